#pragma once

namespace kvlm {

/// The HTML of GET /: page.html, whole.
extern const char* const kPage;

}  // namespace kvlm
