"""Install every folder of code and of configurations below one name, so that no module can clash with another
project's; see __main__.py. pyproject.toml has the rest."""

from setuptools import find_namespace_packages, setup

FOLDERS = find_namespace_packages(include=["config", "models*", "tools*", "utils*"], exclude=["*__pycache__*"])
setup(packages=["resnet50_at_scale", *(f"resnet50_at_scale.{folder}" for folder in FOLDERS)])
