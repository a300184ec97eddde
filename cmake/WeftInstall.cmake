# SPDX-License-Identifier: Apache-2.0
# The program, inputs, job scripts, the checks for ReFrame and the Python package (for pip install); the guide; completion in bash; a file for environment modules.
# No absolute path: the tree can be moved.
include(GNUInstallDirs)
install(TARGETS weft RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
if(WEFT_ENABLE_CUDA)
  set(WEFT_CPU_PROGRAM "" CACHE FILEPATH "Program built without CUDA, installed as weft-cpu: it runs where no GPU can be used")
  if(WEFT_CPU_PROGRAM)
    install(PROGRAMS ${WEFT_CPU_PROGRAM} DESTINATION ${CMAKE_INSTALL_BINDIR} RENAME weft-cpu)
  endif()
endif()
install(DIRECTORY inputs jobscripts python DESTINATION ${CMAKE_INSTALL_DATADIR}/weft PATTERN __pycache__ EXCLUDE)
install(DIRECTORY scripts/reframe DESTINATION ${CMAKE_INSTALL_DATADIR}/weft PATTERN __pycache__ EXCLUDE)
install(FILES README.md CHANGELOG.md CITATION.cff CONTRIBUTING.md SECURITY.md CODE_OF_CONDUCT.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${PROJECT_BINARY_DIR}/share/ DESTINATION ${CMAKE_INSTALL_DATADIR})
configure_file(cmake/modulefile.in modulefile @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/modulefile DESTINATION ${CMAKE_INSTALL_DATADIR}/modulefiles/weft RENAME ${PROJECT_VERSION})
