// python.exe: all that it does is in python311.dll.
#include <windows.h>

int wmain(int count, wchar_t **arguments) {
  HMODULE library = LoadLibraryW(L"python311.dll");
  int (*run)(int, wchar_t **) = library ? (void *)GetProcAddress(library, "Py_Main") : NULL;
  return run ? run(count, arguments) : 111;
}
