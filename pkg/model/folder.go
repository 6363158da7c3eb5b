package model

import (
	"os"
	"path/filepath"
	"strings"
)

// FindFolder returns the folder of the model called name, which has a file, "" where there is
// none, and where it looked: see Registry.Find.
func FindFolder(name, file string) (dir string, tried []string) {
	tried = []string{name}
	if name != "" && !strings.ContainsAny(name, `/\`) {
		if dir := os.Getenv("MEANDER_MODELS"); dir != "" {
			tried = append(tried, filepath.Join(dir, name))
		}
		tried = append(tried, filepath.Join("deploy", "models", name))
		if program, err := os.Executable(); err == nil {
			tried = append(tried, filepath.Join(filepath.Dir(program), "..", "deploy", "models", name))
		}
	}
	for _, dir := range tried {
		if info, err := os.Stat(filepath.Join(dir, file)); err == nil && info.Mode().IsRegular() {
			return dir, tried
		}
	}
	return "", tried
}

// NameOf returns the name that the model at a path has in events: the last element
// of the path, with every character outside A-Z a-z 0-9 _ - replaced by -. In a Hugging
// Face cache, models--ORG--NAME/snapshots/REVISION, it is NAME.
func NameOf(path string) string {
	path = filepath.Clean(path)
	name := filepath.Base(path)
	if up := filepath.Dir(path); filepath.Base(up) == "snapshots" {
		if repository, ok := strings.CutPrefix(filepath.Base(filepath.Dir(up)), "models--"); ok {
			parts := strings.Split(repository, "--")
			name = parts[len(parts)-1]
		}
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-':
			return r
		}
		return '-'
	}, name)
}
