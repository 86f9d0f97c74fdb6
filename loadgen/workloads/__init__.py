"""What is asked: synthetic workloads, files of prompts, recorded traces."""

from loadgen.workloads.base import Source, Workload
from loadgen.workloads.dialogues import Agents, Chat
from loadgen.workloads.file import File
from loadgen.workloads.prompts import Diffusion, FewShot, LongDecode, Rag, SharedPrefix, Unique
from loadgen.workloads.trace import Trace

WORKLOADS: dict[str, type[Workload]] = {
    "shared-prefix": SharedPrefix,
    "chat": Chat,
    "rag": Rag,
    "few-shot": FewShot,
    "agents": Agents,
    "unique": Unique,
    "long-decode": LongDecode,
    "diffusion": Diffusion,
    "file": File,
    "trace": Trace,
}

__all__ = ["WORKLOADS", "Source", "Workload"]
