package boot

import (
	"regexp"
	"runtime/debug"
	"strings"
)

// version is stamped by the linker (-X); see the Makefile.
var version string

// Version returns the version of this build: what the linker stamped, else the module's version, else the revision
// that the build recorded, else "devel".
func Version() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	revision, dirty := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "-dirty"
		}
	}
	if revision == "" {
		return "devel"
	}
	return revision[:min(12, len(revision))] + dirty
}

var (
	semantic  = regexp.MustCompile(`^\d+\.\d+\.\d+(?:[-+][0-9A-Za-z.+-]+)?$`)
	notInTags = regexp.MustCompile(`[^0-9A-Za-z-]+`)
)

// semver puts a version into the form that the NATS micro-service protocol requires. What is not a semantic version
// becomes the build tag of 0.0.0.
func semver(v string) string {
	if s := strings.TrimPrefix(v, "v"); semantic.MatchString(s) {
		return s
	}
	return "0.0.0+" + strings.Trim(notInTags.ReplaceAllString(v, "-"), "-")
}
