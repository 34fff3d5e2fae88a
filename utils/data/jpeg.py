"""Which JPEG files every decoder reads alike."""

SOI, EOI, SOS, APP14 = b"\xff\xd8", b"\xff\xd9", 0xDA, 0xEE
FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended, progressive, all of Huffman codes
# arithmetic, lossless and hierarchical frames; markers that stand alone, or that nobody expects before the image
STRANGE = {0xC3, *range(0xC5, 0xC8 + 1), *range(0xC9, 0xD9 + 1), 0xDC, 0xDE, 0xDF} - {0xC4}
SAMPLING = {0x11, 0x12, 0x21, 0x22}  # of brightness, to that of colour, 0x11: 4:4:4, 4:4:0, 4:2:2, 4:2:0
MOST_PIXELS = 89_478_485  # above, PIL warns of a decompression bomb


def plain_jpeg_size(content: bytes) -> tuple[int, int] | None:
    """(height, width) of a plain JPEG; None for anything else, damaged or not.

    Plain: 8 bits, grey or YCbCr, of Huffman codes, with nothing between or after its segments, the last marker present.
    The marker at the end tells a file that was cut; the walk along the segments (ITU-T T.81, annex B) keeps from a
    stricter decoder what PIL forgives: NVIDIA DALI 2.4 may die of a header that it cannot read.
    """
    if not content.startswith(SOI) or not content.endswith(EOI):
        return None
    position, size = len(SOI), None
    while True:
        header, length = content[position : position + 2], int.from_bytes(content[position + 2 : position + 4], "big")
        end = position + 2 + length
        if len(header) < 2 or header[0] != 0xFF or length < 2 or end > len(content):
            return None
        marker, segment = header[1], content[position + 4 : end]
        if marker < 0xC0 or marker in STRANGE:
            return None
        if marker == APP14 and segment.startswith(b"Adobe") and segment[11:12] != b"\x01":
            return None  # RGB, or of unknown colours
        if marker in FRAMES:
            if size is not None or not _is_plain_frame(segment):
                return None
            size = int.from_bytes(segment[1:3], "big"), int.from_bytes(segment[3:5], "big")
        if marker == SOS:
            return size
        position = end


def _is_plain_frame(segment: bytes) -> bool:
    """Whether a frame header has 8 bits, a size, and one component or three that are Y, Cb and Cr."""
    if len(segment) < 9 or segment[0] != 8 or len(segment) != 6 + 3 * segment[5]:
        return False
    height, width = int.from_bytes(segment[1:3], "big"), int.from_bytes(segment[3:5], "big")
    sampling, names = segment[7::3], segment[6::3]
    known = len(names) == 1 or (names == b"\x01\x02\x03" and sampling[1:] == b"\x11\x11")
    return known and sampling[0] in SAMPLING and 0 < height * width <= MOST_PIXELS
