"""How long answers will be: history, prompt signals and a learned table, blended by how well each has lately done."""

from __future__ import annotations

from scheduler_svc.lengths.predict import TABLE, table_of, with_lengths

__all__ = ["TABLE", "table_of", "with_lengths"]
