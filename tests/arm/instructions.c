// A plugin of QEMU that counts executed instructions in a file, which the emulated program can map and read.
//
// Debian's QEMU comes without its header, so what is used of qemu-plugin.h (interface 1) is declared here.
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct qemu_plugin_tb;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*visit)(uint64_t, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb* block, enum qemu_plugin_op op, void* to, uint64_t by);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* block);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;
static uint64_t* counter;

static void visit(uint64_t id, struct qemu_plugin_tb* block) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, counter, qemu_plugin_tb_n_insns(block));
}

// Argument: to=PATH.
__attribute__((visibility("default"))) int qemu_plugin_install(uint64_t id, const void* info, int argc, char** argv) {
    (void)info;
    if (argc != 1 || strncmp(argv[0], "to=", 3) != 0) return 1;
    const int file = open(argv[0] + 3, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0 || ftruncate(file, sizeof(*counter)) != 0) return 1;
    counter = mmap(NULL, sizeof(*counter), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (counter == MAP_FAILED) return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, visit);
    return 0;
}
