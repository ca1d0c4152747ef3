#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/elementwise.h"
#include "kvcache/kv_cache.h"

// Random sequences through caches of every policy, on any device.
namespace kvlm::testlife {

/// How many rows a first prompt has, and which of them are visual.
struct PromptShape {
  int before = 5;  ///< text rows before the pictures
  std::vector<int> images{40};
  int after = 9;

  std::vector<int16_t> modality() const {
    std::vector<int16_t> tags(static_cast<size_t>(before), kTextRow);
    for (size_t i = 0; i < images.size(); ++i) {
      tags.insert(tags.end(), static_cast<size_t>(images[i]), static_cast<int16_t>(i));
      if (i + 1 < images.size()) tags.push_back(kTextRow);
    }
    tags.insert(tags.end(), static_cast<size_t>(after), kTextRow);
    return tags;
  }
};

inline CacheShape shape_of(int layers, int kv_heads, int q_per_kv, int head_dim) {
  CacheShape shape;
  shape.layers = layers;
  shape.q_heads = kv_heads * q_per_kv;
  shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  for (int i = 0; i < head_dim / 2; ++i) {
    shape.rope_frequencies.push_back(
        std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(head_dim)));
  }
  return shape;
}

inline constexpr int kHidden = 24;

/// Feeds random rows to caches. A row's numbers depend on the sequence's name, its place and the
/// layer alone, so that a sequence is fed the same in every company and to every cache.
class Feeder {
 public:
  explicit Feeder(const CacheShape& shape, int threads = 1, Device device = {})
      : shape_(shape), pool_(threads), stream_(pool_, device) {}

  struct Input {
    char name;
    SequenceId id;
    int first;  ///< tokens fed before
    std::vector<int16_t> modality;
    bool prompt;
    bool ends_prompt = true;  ///< of a prompt: no more of it follows
  };

  Stream& stream() { return stream_; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(shape_.head_dim)); }

  std::vector<float> values(const Input& input, int layer, int what, int width) const {
    std::vector<float> x;
    std::normal_distribution<float> normal;
    for (size_t r = 0; r < input.modality.size(); ++r) {
      const int place = input.first + static_cast<int>(r);
      std::minstd_rand rng(
          static_cast<unsigned>(((place * 31 + layer) * 5 + what) * 127 + input.name));
      rng.discard(3);
      normal.reset();
      for (int i = 0; i < width; ++i) {
        // Channels of different sizes and offsets, as keys have.
        const float size = what == 1 ? 0.4f + 0.2f * static_cast<float>(i % 7) : 1;
        x.push_back(size * normal(rng) + (what == 1 ? 0.1f * static_cast<float>(i % 5) : 0));
      }
    }
    return x;
  }
  std::vector<float> q(const Input& input, int layer) const {
    return values(input, layer, 0, shape_.q_heads * shape_.head_dim);
  }
  std::vector<float> k(const Input& input, int layer) const {
    return values(input, layer, 1, shape_.kv_heads * shape_.head_dim);
  }
  std::vector<float> v(const Input& input, int layer) const {
    return values(input, layer, 2, shape_.kv_heads * shape_.head_dim);
  }
  Tensor embeddings(const std::vector<Input>& inputs) const {
    std::vector<float> all;
    for (const Input& input : inputs) {
      const std::vector<float> numbers = values(input, 0, 3, kHidden);
      all.insert(all.end(), numbers.begin(), numbers.end());
    }
    Tensor x(DType::kF32, {static_cast<int64_t>(all.size()) / kHidden, kHidden});
    std::copy(all.begin(), all.end(), x.view().as<float>());
    return x;
  }

  /// One pass; the outputs of each layer, all rows side by side. Without queries there are none.
  /// Between two layers it is paused for `meanwhile`, unless that is null.
  std::vector<std::vector<float>> pass(KvCache& cache, const std::vector<Input>& inputs,
                                       bool queries = true,
                                       const std::function<void()>& meanwhile = {}) {
    std::vector<StepRows> step;
    for (const Input& input : inputs) {
      StepRows rows;
      rows.sequence = input.id;
      rows.rows = static_cast<int>(input.modality.size());
      rows.prompt = input.prompt;
      rows.ends_prompt = input.prompt && input.ends_prompt;
      rows.modality = input.modality;
      step.push_back(rows);
    }
    cache.begin(step, stream_);
    if (cache.needs().prompt_embeddings) {
      cache.give_embeddings(placed(embeddings(inputs)).view(), stream_);
    }
    std::vector<std::vector<float>> outputs;
    for (int layer = 0; layer < shape_.layers; ++layer) {
      if (layer > 0 && meanwhile) {
        cache.pause();
        meanwhile();
        cache.resume();
      }
      std::vector<float> all[3];
      int64_t total = 0;
      for (const Input& input : inputs) {
        const std::vector<float> x[3] = {q(input, layer), k(input, layer), v(input, layer)};
        for (size_t i = 0; i < 3; ++i) all[i].insert(all[i].end(), x[i].begin(), x[i].end());
        total += static_cast<int64_t>(input.modality.size());
      }
      const auto tensor = [&](const std::vector<float>& x, int heads) {
        Tensor made(DType::kF32, {total, heads, shape_.head_dim});
        std::copy(x.begin(), x.end(), made.view().as<float>());
        return placed(std::move(made));
      };
      const Tensor k = tensor(all[1], shape_.kv_heads);
      const Tensor v = tensor(all[2], shape_.kv_heads);
      Tensor q = tensor(all[0], shape_.q_heads);
      TensorView out;
      if (queries) out = q;  // in place, as the decoder does
      cache.attend(layer, out, k, v, out, scale(), stream_);
      Tensor result(DType::kF32, q.shape());
      copy(result, q, stream_);
      const float* floats = result.view().as<float>();
      outputs.emplace_back(floats, floats + result.shape().elements());
    }
    cache.end(stream_);
    return outputs;
  }

 private:
  /// A tensor where the caches are.
  Tensor placed(Tensor on_host) {
    if (stream_.device().kind == DeviceKind::kCpu) return on_host;
    Tensor there(on_host.dtype(), on_host.shape(), stream_.device());
    copy(there, on_host, stream_);
    return there;
  }

  CacheShape shape_;
  ThreadPool pool_;
  Stream stream_;
};

inline SequenceSize size_of(const std::vector<int16_t>& prompt, int steps) {
  SequenceSize size;
  size.prompt_rows = static_cast<int>(prompt.size());
  size.visual_rows = static_cast<int>(
      std::count_if(prompt.begin(), prompt.end(), [](int16_t t) { return t >= 0; }));
  size.max_rows = size.prompt_rows + steps;
  return size;
}

/// Short windows, so that a hundred steps see many flushes and evictions.
inline constexpr const char* kSpecs[] = {
    "int8",
    "int4",
    "nf4",
    "nf4,group=32,meta=f32",
    "turboquant",
    "turboquant,key_bits=3,value_bits=3,norm=plain,meta=f32",
    "turboquant,key_bits=8,profile=official",
    "turboquant,key_bits=3,values=table",
    "kivi,group=8,residual=16",
    "kivi,bits=4,group=8,residual=16",
    "kivi,bits=3,group=4,residual=8",
    "asymkv,key_layers=1,value_layers=2,group=8,residual=16",
    "head_quantile",
    "head_quantile,bits=2,alpha=0.05",
    "head_quantile,round=floor",
    "calibquant",
    "calibquant,bits=2",
    "calibquant,span=per_image",
    "calibquant,profile=official",
    "calibquant,profile=paper,tau=0:3",
    "calibquant,bits=4 + kivi,scope=text,group=8,residual=16",
    "xquant,group=8,residual=16",
    "xquant,group=8,residual=16,kq=2,vq=0,km=0,vm=0",
    "calibquant,key_bits=2,value_bits=4,value_axis=head",
    "calibquant,bits=2,value_bits=16,span=per_image",
    "calibquant,key_bits=16,value_axis=layer",
    "head_quantile,group_axes=layer",
    "head_quantile,bits=3,value_bits=2,alpha=0.03,group_axes=layer",
    "head_quantile,value_bits=16",
    "uniform,keep=0.6 + head_quantile,key_bits=16",
    "snapkv,keep=0.5,window=8 + head_quantile,group_axes=layer",
    "kivi,bits=1,group=8,residual=16,rotate=hadamard",
    "head_quantile,rotate=hadamard",
    "calibquant,rotate=hadamard + kivi,group=8,residual=16,scope=text,rotate=hadamard",
    "xquant,group=8,residual=16,rotate=hadamard",
    "kivi,group=8,residual=16,rotate=keys",
    "snapkv,keep=0.5 + int4,rotate=keys",
    "xquant,group=8,residual=16,vq=0,vm=0,layer_group=3",
    "xquant,group=8,residual=16,kq=0,km=0,vq=0,vm=0,dominant=1",
    "xquant,group=8,residual=16,kq=0,km=0,vq=0,vm=0,layer_group=3,dominant=2",
    "xquant,group=8,residual=16,kq=0,km=0,vq=2,vm=0,merge=average,gamma=0.5",
    "xquant,group=8,residual=16,kq=2,km=0,vq=0,vm=0,merge=average,gamma=0.2",
    "xquant,group=8,residual=16,kq=2,km=0,vq=2,vm=0,merge=average,gamma=0.4,rotate=hadamard",
    "xquant,group=8,residual=16,kq=2,km=0,vq=2,vm=0,merge=average,gamma=0.6,meta=f32",
    "xquant,group=8,residual=16,kq=2,km=0,vq=2,vm=0,merge=average,gamma=0.3,round=floor",
    "xquant,group=8,residual=16,kq=2,km=0,vq=2,vm=0,merge=average,gamma=0.5,round=ceil",
    "uniform,keep=0.5 + xquant,group=8,residual=16,kq=2,km=0,vq=2,vm=0,merge=average,gamma=0.7",
    "prefixkv,keep=0.5 + xquant,group=8,residual=16,kq=2,km=0,vq=2,vm=0,merge=average,round=floor",
    ("h2o,keep=0.9,head_shared=on + "
     "xquant,group=8,residual=16,kq=2,km=0,vq=2,vm=0,merge=average,tail_keep=0"),
    "xquant,group=8,residual=16,kq=0,km=2,vq=0,vm=0,layer_group=4,dominant=1",
    "prefixkv,keep=0.6 + xquant,group=8,residual=16,kq=0,km=0,vq=0,vm=0,layer_group=3,dominant=1",
    "kivi,group=8,residual=16,rotate=hadamard + int8,layers=0",
    "h2o,keep=0.5 + kivi,group=8,residual=16,rotate=hadamard",
    "prefixkv,keep=0.5,merge=feature + vidkv,group=8,residual=16,rotate=hadamard",
    "vidkv,group=8,residual=16",
    "vidkv,group=8,residual=16,profile=official,fft=on",
    "vidkv,group=8,residual=16,protect=0.2",
    "vidkv,group=8,residual=16,protect=1",
    "vidkv,group=8,residual=24,protect=0.9,flush=requant_all",
    "vidkv,group=8,residual=16,flush=requant_key",
    "vidkv,group=8,residual=16,mask_scope=head,fft=off",
    "vidkv,group=8,residual=16,key_bits=1,value_bits=2",
    "vidkv,group=8,residual=16,criterion=variance,flush=requant_key",
    "vidkv,group=8,residual=16,criterion=outliers,mask_scope=head",
    "vidkv,group=8,residual=16,value_bits=1,protect=0.3,protect_by=random,seed=5",
    "vidkv,group=8,residual=16,key_bits=1.25,profile=paper",
    "vidkv,group=8,residual=16,value_axis=token",
    "vidkv,group=8,residual=24,value_axis=token,value_bits=2,flush=requant_all",
    "prefixkv,keep=0.5 + vidkv,group=8,residual=16,value_axis=token,scale=twn,protect=0.3",
    "uniform,keep=0.5",
    "uniform,keep=0.1,sinks=9,last=40",
    "prefixkv,keep=0.3",
    "prefixkv,keep=0.5,evict=sliding",
    "prefixkv,keep=0.4,merge=position",
    "prefixkv,keep=0.4,merge=feature",
    "streaming,keep=0.4",
    "streaming,keep=0.4,rerotate=on",
    "streaming,keep=0.6,budget=proportional,rerotate=on,sinks=3",
    "streaming,keep=0.5,rerotate=on,sinks=0",
    "h2o,keep=0.4",
    "h2o,keep=0.5,head_shared=on",
    "h2o,keep=0.95,head_shared=on",
    "snapkv,keep=0.5,window=8",
    "pyramidkv,keep=0.5,window=8",
    "mixkv,keep=0.5,window=8",
    "tgv,keep=0.4",
    "tgv,keep=0.3,budgets=clipped,evict=none",
    "tgv,keep=0.5,profile=official",
    "tgv,keep=0.6,evict=step + kivi,group=8,residual=16",
    "tgv,keep=0.5,sinks=9,last=7 + kivi,group=8,residual=16 + share=codes",
    "mixkv,keep=0.4,window=8,mode=mean,head_shared=on + kivi,group=8,residual=16 + share=codes",
    "elastic,keep=0.4",
    "elastic,keep=0.4,profile=official",
    "elastic,keep=0.3,anchors=inner,sinks=9,last=7 + kivi,group=8,residual=16",
    "vlcache,keep=0.4",
    "vlcache,keep=0.1,sinks=9,recent=1",
    "vlcache,keep=0.4,profile=paper",
    "vlcache,keep=0.5,head_shared=off + kivi,group=8,residual=16",
    "prefixkv,keep=0.5 + kivi,group=8,residual=16",
    "prefixkv,keep=0.5,evict=fixed_index + kivi,group=8,residual=16,tail_keep=0",
    "uniform,keep=0.5 + calibquant",
    "prefixkv,keep=0.5 + vidkv,group=8,residual=16",
    "prefixkv,keep=0.5,evict=fixed_index + vidkv,group=8,residual=16,protect=0.2,tail_keep=0",
    "prefixkv,keep=0.5 + xquant,group=8,residual=16,kq=2,vq=0,km=0,vm=0",
    "streaming,keep=0.3 + kivi,group=8,residual=16",
    "streaming,keep=0.5 + int4,tail_keep=0",
    "uniform,keep=0.5,evict=score + kivi,group=8,residual=16",
    "h2o,keep=0.4 + kivi,group=4,residual=8,tail_keep=0",
    "tova,keep=0.5 + asymkv,group=8,residual=16,tail_keep=0",
    "prefixkv,keep=0.5 + calibquant,bits=2",
    "streaming,keep=0.4 + calibquant,span=per_image",
    "h2o,keep=0.5 + calibquant,span=per_image",
    "h2o,keep=0.5 + calibquant + f16,layers=0-1",
    "calibquant + f16,layers=0",
    "int4 + f16,layers=0",
    "streaming,keep=0.5 + kivi,group=8,residual=16 + f16,layers=0",
    "uniform,keep=0.5,evict=sliding,distance=33 + int4",
    "h2o,keep=0.5 + head_quantile + kivi,scope=text,group=8,residual=16",
    "h2o,keep=0.4 + head_quantile + kivi,scope=text,group=8,residual=16",
    "streaming,keep=0.5 + calibquant,bits=2 + int4,scope=text",
    "h2o,keep=0.5 + int4",
    "h2o,keep=0.5 + nf4",
    "snapkv,keep=0.5 + turboquant",
    "turboquant + share=codes",
    "turboquant,scope=visual + int4,scope=text,rotate=keys",
    "h2o,keep=0.5 + kivi,group=8,residual=16",
    "snapkv,keep=0.5,window=8 + calibquant",
    "elastic,keep=0.5 + kivi,group=8,residual=16",
    "vlcache,keep=0.5 + head_quantile",
    "prefixkv,keep=0.5 + kivi,group=8,residual=16 + share=codes",
    "kivi,group=8,residual=16 + share=codes",
    "calibquant,bits=2 + share=codes",
    "vidkv,group=8,residual=16,scope=visual",
    "vidkv,group=8,residual=16,scope=text",
    "visual=vidkv text=vidkv",
    "calibquant + vidkv,group=8,residual=16,scope=text",
    "vidkv,group=8,residual=16,key_bits=1.25,scope=visual + kivi,group=8,residual=16,scope=text",
    "h2o,keep=0.95,head_shared=on + int4,tail_keep=0 + share=codes",
    "h2o,keep=0.9,head_shared=on + kivi,group=4,residual=8,tail_keep=0 + share=codes",
    "h2o,keep=0.95,head_shared=on + xquant,group=8,residual=16,kq=2,vq=0,km=0,vm=0,tail_keep=0",
    ("h2o,keep=0.6,head_shared=on + "
     "xquant,group=8,residual=16,kq=0,km=0,vq=0,vm=0,layer_group=3,dominant=1"),
    "streaming,keep=0.5 + xquant,group=8,residual=16,kq=0,km=0,vq=0,vm=0",
    ("snapkv,keep=0.5,window=8,evict=score,head_shared=on + "
     "xquant,group=8,residual=16,kq=0,km=2,vq=0,vm=0"),
    "uniform,keep=0.3,evict=fixed_index + kivi,group=4,residual=8,tail_keep=0 + share=codes",
    "streaming,keep=0.5 + kivi,group=4,residual=8,tail_keep=0 + share=codes",
    ("prefixkv,keep=0.4,evict=fixed_index,distance=60 + kivi,group=2,residual=4,tail_keep=0 + "
     "share=codes"),
    "h2o,keep=0.5 + vidkv,group=8,residual=16",
    "h2o,keep=0.7 + vidkv,group=8,residual=8,protect=0.8,tail_keep=20",
    "prefixkv,keep=0.7 + vidkv,group=8,residual=8,protect=1",
    "snapkv,keep=0.5,window=8 + vidkv,group=8,residual=16,flush=requant_key",
    "tova,keep=0.5",
    "tova,keep=0.5,evict=none",
    "tova,keep=0.4,profile=official + calibquant",
    "tova,keep=0.1,sinks=9",
    "tova,keep=0.5 + kivi,group=8,residual=16",
    "tova,keep=0.6 + kivi,group=4,residual=8,tail_keep=0 + share=codes",
    "prefixkv,keep=0.5,evict=sliding,distance=12 + kivi,group=8,residual=16,tail_keep=0",
    "random,keep=0.4",
    "random,keep=0.5,head_shared=on,seed=3 + kivi,group=8,residual=16 + share=codes",
    "random,keep=0.4,evict=score + calibquant",
    "random,keep=0.5,evict=score + kivi,group=8,residual=16,tail_keep=0",
    "random,keep=0.5 + int4",
    "prefixkv,keep=0.5,profile=paper,mode=online,fit=greedy",
    "snapkv,keep=0.5,window=8,evict=score",
    "snapkv,keep=0.5,window=8,evict=window,distance=6",
    "snapkv,keep=0.5,window=8,evict=sliding,distance=9 + calibquant",
    "uniform,keep=0.3,evict=score + kivi,group=4,residual=8,tail_keep=0 + share=codes",
    "knorm,keep=0.5",
    "knorm,keep=0.4,evict=score + calibquant",
    "knorm,keep=0.5,head_shared=on + kivi,group=8,residual=16 + share=codes",
    "keydiff,keep=0.5",
    "keydiff,keep=0.4,sinks=9 + kivi,group=8,residual=16",
    "expected_attention,keep=0.5,future=30",
    "expected_attention,keep=0.4,future=3,epsilon=0.01,sinks=2 + int4",
    "expected_attention,keep=0.3,covariance=off,values=off,head_shared=on",
    "pyramidinfer,keep=0.5",
    "pyramidinfer,keep=0.6,least=8,profile=official",
    "pyramidinfer,keep=0.3,profile=paper,decay=0.5,recent=0.1,weight=9 + kivi,group=8,residual=16",
    "pyramidinfer,keep=0.4,schedule=geometric,decay=0.2,least=8,evict=none + calibquant",
    "pyramidinfer,keep=0.5,sinks=9 + kivi,group=4,residual=8,tail_keep=0 + share=codes",
};

inline std::string name_of_spec(const ::testing::TestParamInfo<const char*>& tested) {
  std::string name;
  for (const char* c = tested.param; *c != 0; ++c) {
    name += std::isalnum(static_cast<unsigned char>(*c)) != 0 ? *c : '_';
  }
  return name;
}

}  // namespace kvlm::testlife
