"""Records of what happens: counters and spans, which cost nothing if they are off; the phase of every rank;
traces."""

from imbrex.observe.board import Phase, PhaseBoard, find_dead, read_board
from imbrex.observe.bracket import bracket_backward
from imbrex.observe.observer import Observer
from imbrex.observe.recorder import PHASES, Recorder, Span, fold
from imbrex.observe.trace import merge_traces, trace_events

__all__ = [
    "PHASES",
    "Observer",
    "Phase",
    "PhaseBoard",
    "Recorder",
    "Span",
    "bracket_backward",
    "find_dead",
    "fold",
    "merge_traces",
    "read_board",
    "trace_events",
]
