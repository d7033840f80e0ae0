// Random bytes, from the function that Wine does have.
#include <windows.h>

BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T count) {
  return SystemFunction036(bytes, (ULONG)count);
}
