#include "tools/kv/vlm_kv.h"

int main(int argc, char** argv) { return kvlm::vlm_kv(argc, argv); }
