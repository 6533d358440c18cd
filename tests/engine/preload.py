"""Imported once, by the fork server that every engine test forks its processes from.

Importing vLLM takes 8 s and ``LLM`` in three processes 20 s; an in-process engine in a forked child starts in 2 s.
``TORCH_COMPILE_DISABLE`` keeps vLLM from compiling its logprobs (3 to 19 s a process) with the same results; compiled
tests switch Dynamo on again in their child.
"""

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    TORCH_COMPILE_DISABLE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    # The number of threads changes the last bits of a matrix product. Numba, which ngram speculation uses, sets that
    # of OpenMP for the whole process, and an FFN server has no Numba: equal numbers everywhere.
    OMP_NUM_THREADS="1",
    NUMBA_NUM_THREADS="1",
)

import vllm.entrypoints.llm
import vllm.v1.engine.core
import vllm.v1.engine.llm_engine
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
