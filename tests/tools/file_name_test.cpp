#include "tools/common/file_name.h"

#include <gmock/gmock.h>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string refusal(const std::string& name) {
  try {
    return "accepted: " + path_in("in", name, "image");
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(FileName, AnAddressOfTheMachineIsAPath) {
  EXPECT_EQ(path_of_name("file:///a%20b%41.png", "image"), "/a bA.png");
  EXPECT_EQ(path_of_name("FILE://localhost/a.png", "image"), "/a.png");
  for (const char* name : {"/x%-1.png", "/x%+1.png", "/x% 1.png", "/x%1.png", "/x%", "/x%0"}) {
    EXPECT_EQ(path_of_name(std::string("file://") + name, "image"), name) << "not two hex digits";
  }
  EXPECT_THAT(refusal("file://host/a.png"), HasSubstr("names another machine"));
}

TEST(FileName, AddressesOfTheNetworkAreRefused) {
  for (const char* name : {"http://a.org/b.png", "HTTPS://a.org/b.png", "ftp:a",
                           "s3://bucket/a.png", "gs://bucket/a.png", "hdfs://a/b.png"}) {
    EXPECT_THAT(refusal(name), AllOf(HasSubstr(name), HasSubstr("is a URL"))) << name;
  }
  EXPECT_EQ(refusal("a:b.png"), "accepted: in/a:b.png");
  EXPECT_EQ(refusal("://b.png"), "accepted: in/://b.png");
  EXPECT_THAT(refusal("data:image/png;base64,iVBORw0KGgo="), HasSubstr("is a data URI"));
}

TEST(FileName, WhatNoFileIsCalledGetsItsOwnSentence) {
  for (const char* name : {"images\\a.png", "C:\\photos\\a.png", ".\\a.png"}) {
    EXPECT_THAT(refusal(name), HasSubstr("has backslashes, as Windows")) << name;
  }
  for (const char* name : {"images\bcat.png", "images\tree.png", "images\new.png"}) {
    EXPECT_THAT(refusal(name), HasSubstr("has a control character, as \\b and \\t")) << name;
  }
  for (const char* name : {" a.png", "a.png ", "images/a.png  "}) {
    EXPECT_THAT(refusal(name), HasSubstr("begins or ends with a blank")) << name;
  }
  const std::string word(80, 'A');
  for (const std::string& name :
       {"iVBORw0KGgo" + word, "/9j/" + word, "R0lGODlh" + word, std::string(300, 'q') + "=="}) {
    EXPECT_THAT(refusal(name), HasSubstr("is base64 text, not a file name")) << name;
  }
  for (const std::string& name : {std::string("a b.png"), "images/" + word + ".png", word}) {
    EXPECT_EQ(refusal(name), "accepted: in/" + name);
  }
}

}  // namespace
}  // namespace kvlm
