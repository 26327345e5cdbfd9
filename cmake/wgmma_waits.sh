#!/bin/sh
# Runs a compiler, and fails where ptxas says that it has wgmma wait for each other (C7510 to C7519): several times slower,
# and no warning that -Werror would turn into an error.
#   sh cmake/wgmma_waits.sh nvcc ...
said=$("$@" 2>&1)
status=$?
[ -z "${said}" ] || printf '%s\n' "${said}" >&2
case ${said} in
*'(C751'*)
    echo "wgmma_waits.sh: ptxas serialises wgmma, see above; the kernel must be written so that it need not." >&2
    exit 1
    ;;
esac
exit "${status}"
