#pragma once

#include "kvcache/spec/policy.h"

// Entries of all policies, each defined in the policy's own file. registry.cpp lists the built-in
// ones.

namespace kvlm::quantizers {

extern const QuantizerEntry asymkv;
extern const QuantizerEntry calibquant;
extern const QuantizerEntry head_quantile;
extern const QuantizerEntry int4;
extern const QuantizerEntry int8;
extern const QuantizerEntry kivi;
extern const QuantizerEntry nf4;
extern const QuantizerEntry turboquant;
extern const QuantizerEntry vidkv;
extern const QuantizerEntry xquant;

}  // namespace kvlm::quantizers

namespace kvlm::retention {

extern const RetentionEntry elastic;
extern const RetentionEntry expected_attention;
extern const RetentionEntry h2o;
extern const RetentionEntry keydiff;
extern const RetentionEntry mixkv;
extern const RetentionEntry tgv;
extern const RetentionEntry knorm;
extern const RetentionEntry prefixkv;
extern const RetentionEntry pyramidinfer;
extern const RetentionEntry pyramidkv;
extern const RetentionEntry random;
extern const RetentionEntry snapkv;
extern const RetentionEntry streaming;
extern const RetentionEntry tova;
extern const RetentionEntry uniform;
extern const RetentionEntry vlcache;

}  // namespace kvlm::retention
