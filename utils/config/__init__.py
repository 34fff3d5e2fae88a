"""Configuration: named YAML blocks in, one typed, checked, frozen `Config` out; and the command line of train.py."""

from utils.config.blocks import find_file, list_blocks, load_config, override
from utils.config.config import Config

__all__ = ["Config", "find_file", "list_blocks", "load_config", "override"]
