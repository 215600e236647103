"""Which model is served: its states, the switch from one to the next, failure and recovery."""

from ftd.lifecycle.lifecycle import Lifecycle
from ftd.lifecycle.served import How, Models, Phase, Progress, Reloaded, ServedModel, State

__all__ = ["How", "Lifecycle", "Models", "Phase", "Progress", "Reloaded", "ServedModel", "State"]
