"""What is asked: synthetic workloads, files of prompts, recorded traces."""

from loadgen.http.workloads.base import Source, Workload
from loadgen.http.workloads.dialogues import Agents, Chat
from loadgen.http.workloads.file import File
from loadgen.http.workloads.prompts import Diffusion, FewShot, LongDecode, Rag, SharedPrefix, Unique
from loadgen.http.workloads.trace import Trace

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
