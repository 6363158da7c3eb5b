package schemas

import (
	"slices"
	"strings"
	"sync"
)

var specs = sync.OnceValue(Streams)

// StreamOf returns the stream that stores a subject; false if none does.
func StreamOf(subject string) (StreamSpec, bool) {
	fits := func(filter string) bool { return Matches(filter, subject) }
	return findStream(func(s StreamSpec) bool { return slices.ContainsFunc(s.Subjects, fits) })
}

// StreamNamed returns the stream with a name; false if there is none.
func StreamNamed(name string) (StreamSpec, bool) {
	return findStream(func(s StreamSpec) bool { return s.Name == name })
}

func findStream(is func(StreamSpec) bool) (StreamSpec, bool) {
	i := slices.IndexFunc(specs(), is)
	if i < 0 {
		return StreamSpec{}, false
	}
	return specs()[i], true
}

// StreamNames returns the names of all streams of a server, those behind buckets first.
func StreamNames() (names []string) {
	for _, bucket := range Buckets() {
		names = append(names, bucket.Stream())
	}
	for _, spec := range specs() {
		names = append(names, spec.Name)
	}
	return names
}

// Matches reports whether a subject fits a filter: * stands for one token, > for all that follow.
func Matches(filter, subject string) bool {
	for {
		f, filterRest, moreFilter := strings.Cut(filter, ".")
		s, subjectRest, moreSubject := strings.Cut(subject, ".")
		switch {
		case f == ">":
			return s != ""
		case f != "*" && f != s, s == "":
			return false
		case !moreFilter || !moreSubject:
			return moreFilter == moreSubject
		}
		filter, subject = filterRest, subjectRest
	}
}

// Overlap reports whether some subject fits both filters.
func Overlap(a, b string) bool {
	x, y := strings.Split(a, "."), strings.Split(b, ".")
	for i := range x {
		switch {
		case x[i] == ">":
			return len(y) > i
		case i >= len(y):
			return false
		case y[i] == ">":
			return true
		case x[i] != y[i] && x[i] != "*" && y[i] != "*":
			return false
		}
	}
	return len(x) == len(y)
}
