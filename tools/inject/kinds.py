"""The kinds of tensors in which a bit can flip. No torch, for the command line."""

IN_MEMORY = ("weight", "optimizer", "batch")  # change before the step reads them
IN_PYTHON = ("gradient", "activation")  # change while the step is on its way: not where it is captured or compiled
AT_REST = ("weight at rest", "optimizer at rest")  # change between two steps
KINDS = (*IN_MEMORY, *IN_PYTHON, *AT_REST)
