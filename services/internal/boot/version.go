package boot

import (
	"regexp"
	"runtime/debug"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// version is stamped by the linker (-X); see the Makefile.
var version string

// Version returns the version of this build: what the linker stamped, else that of a tagged module, else
// schemas.Release and the revision that the build recorded, as in 0.1.0+g81f3900a52e0.dirty.
func Version() string {
	if version != "" && version != "devel" { // which images are built with where no version is given
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return schemas.Release + "+devel"
	}
	if v := strings.TrimPrefix(info.Main.Version, "v"); semantic.MatchString(v) && !pseudo.MatchString(v) {
		return v
	}
	if m := pseudo.FindStringSubmatch(info.Main.Version); m != nil { // 'go install ...@main', and builds in a checkout
		return schemas.Release + "+g" + m[1] + strings.ReplaceAll(m[2], "+", ".")
	}
	return schemas.Release + "+devel"
}

// pseudo matches what Go calls a commit without a tag: the revision, and whether files differed from it.
var pseudo = regexp.MustCompile(`[.-]\d{14}-([0-9a-f]{12})(\+dirty)?$`)

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
