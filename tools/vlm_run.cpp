#include "tools/run/vlm_run.h"

#include "tools/run/chat.h"

int main(int argc, char** argv) { return kvlm::vlm_run(argc, argv, &kvlm::run_chat); }
