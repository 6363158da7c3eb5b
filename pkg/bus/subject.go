package bus

import (
	"crypto/rand"
	"strings"
	"sync"

	"github.com/meander-rl/meander/schemas"
)

var specs = sync.OnceValue(schemas.Streams)

// specOf is the stream that stores a subject.
func specOf(subject string) (schemas.StreamSpec, bool) {
	for _, s := range specs() {
		for _, pattern := range s.Subjects {
			if matches(pattern, subject) {
				return s, true
			}
		}
	}
	return schemas.StreamSpec{}, false
}

// specNamed is the stream of that name.
func specNamed(name string) (schemas.StreamSpec, bool) {
	for _, s := range specs() {
		if s.Name == name {
			return s, true
		}
	}
	return schemas.StreamSpec{}, false
}

// matches says whether a subject fits a pattern with * and >.
func matches(pattern, subject string) bool {
	for {
		p, patternRest, morePattern := strings.Cut(pattern, ".")
		s, subjectRest, moreSubject := strings.Cut(subject, ".")
		switch {
		case p == ">":
			return s != ""
		case p != "*" && p != s, s == "":
			return false
		case !morePattern || !moreSubject:
			return morePattern == moreSubject
		}
		pattern, subject = patternRest, subjectRest
	}
}

func randomToken() string { return strings.ToLower(rand.Text()[:16]) }
