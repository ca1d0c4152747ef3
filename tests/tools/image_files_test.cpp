#include "tools/run/image_files.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

namespace kvlm {
namespace {

namespace fs = std::filesystem;
using namespace std::string_view_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class ImageFiles : public testing::Test {
 protected:
  ImageFiles() {
    std::string pattern = (fs::temp_directory_path() / "kvlm-images-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~ImageFiles() override { fs::remove_all(folder_); }

  void make(const std::string& name, const std::string& text = "") const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }
  std::vector<std::string> below(std::vector<std::string> paths) const {
    for (std::string& path : paths) path = fs::path(path).lexically_relative(folder_).string();
    return paths;
  }
  std::vector<std::string> matches(const std::string& pattern) const {
    return below(files_of_pattern((folder_ / pattern).string(), [](const auto&) { return false; },
                                  left_out_));
  }

  fs::path folder_;
  mutable std::string left_out_;  // of matches()
};

TEST_F(ImageFiles, OfAFolderAreNamedAndTheRestIsCounted) {
  std::string left_out = "?";
  const auto none = [](const std::string&) { return false; };
  make("b.png");
  make("a.JPG");
  EXPECT_THAT(below(images_in(folder_, none, left_out)), ElementsAre("a.JPG", "b.png"));
  EXPECT_EQ(left_out, "");
  make("deep/c.png");
  make(".hidden.png");
  make("notes.txt", "words");
  make("IMG_1", "\xff\xd8\xff\xe0");
  make("IMG_2.bak", "\x89PNG\r\n\x1a\n");
  make("clip.MP4");
  make("out.jsonl");
  const auto output = [](const std::string& path) { return path.ends_with("out.jsonl"); };
  EXPECT_THAT(below(images_in(folder_, output, left_out)), ElementsAre("a.JPG", "b.png"));
  EXPECT_THAT(left_out,
              AllOf(HasSubstr("takes 2 images and leaves out 1 folder (give '"),
                    HasSubstr("/**' for images of all depths), 2 images not named"),
                    HasSubstr(", 1 video ("), HasSubstr(", 1 hidden file, 1 other file")));
}

TEST_F(ImageFiles, BeginAsTheirFormats) {
  for (const auto head : {"BM\x46\1\0\0\0\0\0\0\x36"sv,
                          "\0\0\0\x1c"
                          "ftypheix\0\0"sv,
                          "\0\0\0\x20"
                          "ftypavif\0\0"sv,
                          "RIFF\1\2\3\4WEBPVP8 "sv}) {
    EXPECT_TRUE(begins_like_image(head)) << head;
  }
  for (const auto head : {"BMW and Audi, a list"sv, "BM"sv,
                          "\0\0\0\x20"
                          "ftypisom\0\0"sv,
                          ""sv}) {
    EXPECT_FALSE(begins_like_image(head)) << head;
  }
}

TEST_F(ImageFiles, APatternGoesAsDeepAsItSays) {
  for (const char* name : {"a.png", "b.txt", "x/c.png", "x/y/d.png", "x/y/e.jpg", "x/.h/f.png",
                           "z.d/g.png", ".i.png", "[j].png"}) {
    make(name);
  }
  fs::create_directory_symlink(folder_, folder_ / "x/loop");
  EXPECT_THAT(matches("*.png"), ElementsAre("[j].png", "a.png"));
  EXPECT_THAT(matches("*/*.png"), ElementsAre("x/c.png", "z.d/g.png"));
  EXPECT_THAT(matches("**/*.png"),
              ElementsAre("[j].png", "a.png", "x/c.png", "x/y/d.png", "z.d/g.png"));
  EXPECT_THAT(matches("**"),
              ElementsAre("[j].png", "a.png", "x/c.png", "x/y/d.png", "x/y/e.jpg", "z.d/g.png"));
  make("IMG_3", "\xff\xd8\xff\xe0");
  make("x/y/clip.mov");
  matches("**");
  EXPECT_THAT(left_out_, AllOf(HasSubstr("takes 6 images and leaves out 1 link to folders"),
                               HasSubstr("1 image not named like one"), HasSubstr(", 1 video ("),
                               HasSubstr(", 2 hidden files, 1 other file")));
  EXPECT_THAT(matches("x/**/*.[jp]*"), ElementsAre("x/c.png", "x/y/d.png", "x/y/e.jpg"));
  EXPECT_THAT(matches("**/y/**/?.png"), ElementsAre("x/y/d.png"));
  EXPECT_EQ(left_out_, "");
  EXPECT_THAT(matches(".*.png"), ElementsAre(".i.png"));
  EXPECT_THAT(matches("\\[j\\].p?g"), ElementsAre("[j].png"));
  EXPECT_THAT(matches("gone/*.png"), ElementsAre());
  EXPECT_THAT(matches("**/gone*"), ElementsAre());
  EXPECT_EQ(folder_of_pattern("in/a/*/b/*.png"), "in/a/");
  EXPECT_EQ(folder_of_pattern("*.png"), "");
  EXPECT_TRUE(is_pattern((folder_ / "*.png").string()));
  EXPECT_FALSE(is_pattern((folder_ / "[j].png").string())) << "a file of that name";
}

}  // namespace
}  // namespace kvlm
