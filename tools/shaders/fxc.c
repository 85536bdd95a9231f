// fxc.exe [debug]: compiles the HLSL files that standard input names, one a line, with Microsoft's FXC (D3DCompile).
// The flags are wgpu's: of a release build, or of a debug build with `debug`. Answers one line each:
//   ok     SECONDS  INSTRUCTIONS  REGISTERS  ARRAYS
//   error  SECONDS  MESSAGE
// SECONDS: of a processor. ARRAYS: registers of arrays that are indexed and so lie in memory. Fields are separated by tabs.
#include <windows.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Blob Blob;
struct Blob {
    struct {
        HRESULT(WINAPI *query_interface)(Blob *, const void *, void **);
        ULONG(WINAPI *add_ref)(Blob *);
        ULONG(WINAPI *release)(Blob *);
        void *(WINAPI *pointer)(Blob *);
        SIZE_T(WINAPI *size)(Blob *);
    } *call;
};
typedef HRESULT(WINAPI *Compile)(const void *, SIZE_T, const char *, const void *, void *, const char *, const char *,
                                 UINT, UINT, Blob **, Blob **);
typedef HRESULT(WINAPI *Disassemble)(const void *, SIZE_T, UINT, const char *, Blob **);

enum { D3DCOMPILE_DEBUG = 1 << 0, D3DCOMPILE_SKIP_OPTIMIZATION = 1 << 2, D3DCOMPILE_ENABLE_STRICTNESS = 1 << 11 };

static char *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char *text = malloc(*size + 1);
    if (text && fread(text, 1, *size, file) != *size) *size = 0;
    fclose(file);
    return text;
}

// Adds up NUMBER of each line "dcl_indexableTemp xN[NUMBER], WIDTH".
static unsigned arrays(const char *text) {
    unsigned sum = 0, length;
    for (const char *at = text; (at = strstr(at, "dcl_indexableTemp")); at++) {
        const char *bracket = strchr(at, '[');
        if (bracket && sscanf(bracket, "[%u]", &length) == 1) sum += length;
    }
    return sum;
}

static unsigned number_after(const char *text, const char *word) {
    const char *at = strstr(text, word);
    unsigned number = 0;
    if (at) sscanf(at + strlen(word), "%u", &number);
    return number;
}

static void print_error(const char *text) {
    const char *start = strstr(text, "error X");
    if (!start) start = *text ? text : "no message";
    size_t length = strcspn(start, "\r\n");
    printf("%.*s\n", (int)length, start);
}

// The time that processors have spent on this program.
static double processor_seconds(void) {
    FILETIME created, ended, kernel, user;
    GetProcessTimes(GetCurrentProcess(), &created, &ended, &kernel, &user);
    double high = (double)kernel.dwHighDateTime + (double)user.dwHighDateTime;
    return (high * 4294967296.0 + (double)kernel.dwLowDateTime + (double)user.dwLowDateTime) / 1e7;
}

int main(int count, char **arguments) {
    HMODULE library = LoadLibraryA("d3dcompiler_47.dll");
    Compile compile = library ? (Compile)(void *)GetProcAddress(library, "D3DCompile") : NULL;
    Disassemble disassemble = library ? (Disassemble)(void *)GetProcAddress(library, "D3DDisassemble") : NULL;
    if (!compile || !disassemble) {
        fprintf(stderr, "no d3dcompiler_47.dll with D3DCompile and D3DDisassemble\n");
        return 2;
    }
    UINT flags = D3DCOMPILE_ENABLE_STRICTNESS;
    if (count > 1 && !strcmp(arguments[1], "debug")) flags |= D3DCOMPILE_DEBUG | D3DCOMPILE_SKIP_OPTIMIZATION;
    static char path[4096];
    while (fgets(path, sizeof path, stdin)) {
        path[strcspn(path, "\r\n")] = 0;
        size_t size = 0;
        char *text = read_file(path, &size);
        if (!text) {
            printf("error\t0\tcannot read %s\n", path);
            fflush(stdout);
            continue;
        }
        Blob *code = NULL, *messages = NULL, *assembly = NULL;
        double start = processor_seconds();
        HRESULT result = compile(text, size, "kernel", NULL, NULL, "main", "cs_5_1", flags, 0, &code, &messages);
        double seconds = processor_seconds() - start;
        if (result < 0 || !code) {
            printf("error\t%.2f\t", seconds);
            print_error(messages ? messages->call->pointer(messages) : "");
        } else if (disassemble(code->call->pointer(code), code->call->size(code), 0, NULL, &assembly) < 0) {
            printf("error\t%.2f\tcannot be disassembled\n", seconds);
        } else {
            const char *listing = assembly->call->pointer(assembly);
            printf("ok\t%.2f\t%u\t%u\t%u\n", seconds, number_after(listing, "Approximately "),
                   number_after(listing, "dcl_temps "), arrays(listing));
        }
        fflush(stdout);
        if (code) code->call->release(code);
        if (messages) messages->call->release(messages);
        if (assembly) assembly->call->release(assembly);
        free(text);
    }
    return 0;
}
