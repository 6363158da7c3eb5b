// Package mediatest has what tests need in place of other programs.
package mediatest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Head is what an mp4 of the program of FFmpeg begins with; after it comes the video that it was given.
const Head = "\x00\x00\x00\x18ftypmp42"

const program = `#!/bin/sh
while [ "$1" != "-i" ]; do shift; done
in=$2
for out; do :; done
{ printf '\000\000\000\030ftypmp42'; /bin/cat "$in"; } > "$out"
`

// FFmpeg has a program in the PATH, for the length of a test, that stands for ffmpeg; with have false there is none.
func FFmpeg(t *testing.T, have bool) {
	t.Helper()
	dir := t.TempDir()
	if have {
		if err := os.WriteFile(filepath.Join(dir, "ffmpeg"), []byte(program), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	list := []string{dir}
	for _, at := range filepath.SplitList(os.Getenv("PATH")) {
		if _, err := os.Stat(filepath.Join(at, "ffmpeg")); err != nil {
			list = append(list, at)
		}
	}
	t.Setenv("PATH", strings.Join(list, string(os.PathListSeparator)))
}
