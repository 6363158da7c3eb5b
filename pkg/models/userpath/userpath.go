// Package userpath reads paths as shells and other programs of a user write them.
package userpath

import (
	"os"
	"path/filepath"
	"strings"
)

// Expand replaces ~ and variables in a path, as huggingface_hub and the nats command do.
func Expand(path string) string {
	path = os.ExpandEnv(path)
	if rest, ok := strings.CutPrefix(path, "~"); ok && (rest == "" || rest[0] == '/') {
		if h, err := os.UserHomeDir(); err == nil {
			return filepath.Join(h, rest)
		}
	}
	return path
}
