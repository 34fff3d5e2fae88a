"""`python -m utils.config` prints config/schema.json; with --default-block, the block `default` of cifar100.yaml."""

import json
import sys

from utils.config.config import default_block, schema

if __name__ == "__main__":
    print(default_block() if "--default-block" in sys.argv[1:] else json.dumps(schema(), indent=1), end="")
