# SPDX-License-Identifier: Apache-2.0
include(GNUInstallDirs)
install(TARGETS weft RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY inputs jobscripts DESTINATION ${CMAKE_INSTALL_DATADIR}/weft)
