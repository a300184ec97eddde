# SPDX-License-Identifier: Apache-2.0
# Environment of all tests. They start the program hundreds of times: Open MPI then needs 0.05 s instead of 0.35 s, since
# it neither searches for network libraries nor starts a daemon for a single process. Ranks that wait leave the cores to others.
include_guard(GLOBAL)
set(WEFT_TEST_ENVIRONMENT OMP_PROC_BIND=false OMP_WAIT_POLICY=passive OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  OMPI_MCA_pml=ob1 OMPI_MCA_ess_singleton_isolated=1 OMPI_MCA_mpi_yield_when_idle=1)
if(NOT WEFT_ENABLE_CUDA)
  list(APPEND WEFT_TEST_ENVIRONMENT OMP_NUM_THREADS=1)
endif()
