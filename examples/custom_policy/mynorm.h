#pragma once

/// After this call every spec may name the rule "mynorm".
void register_mynorm();
