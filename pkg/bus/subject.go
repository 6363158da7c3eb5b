package bus

import (
	"crypto/rand"
	"hash/fnv"
	"strconv"
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

// StoredSubject is the subject that the event published on subject is kept under: rewards
// and openings get a partition token.
func StoredSubject(subject string) string {
	if spec, ok := specOf(subject); !ok || spec.TransformDest == "" {
		return subject
	}
	// The one transform there is: mdr.v1.<kind>.<partition>.<run>.<batch>.<uid>[.<sample>].
	kind, rest, _ := strings.Cut(strings.TrimPrefix(subject, schemas.Prefix), ".")
	tokens := strings.Split(rest, ".")
	if len(tokens) < 3 {
		return subject
	}
	return schemas.Prefix + kind + "." + strconv.Itoa(Partition(tokens[1])) + "." + rest
}

// publishedSubject is the subject that an event stored under subject was published on.
func publishedSubject(subject string) string {
	kind, rest, _ := strings.Cut(strings.TrimPrefix(subject, schemas.Prefix), ".")
	_, published, _ := strings.Cut(rest, ".")
	if s := schemas.Prefix + kind + "." + published; s != subject && StoredSubject(s) == subject {
		return s
	}
	return subject
}

// Partition is the partition of MDR_REWARDS that holds a batch: the server's own hash
// (FNV-1a, 32 bits) modulo schemas.RewardPartitions.
func Partition(batch string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(batch)) // never fails
	return int(h.Sum32() % schemas.RewardPartitions)
}

// RewardFilter matches the stored rewards of a run, a batch and a uid, each of which
// may be "*". Stored rewards have a partition token that schemas.RewardSubject lacks.
func RewardFilter(run, batch, uid string) string {
	partition := "*"
	if batch != "*" {
		partition = strconv.Itoa(Partition(batch))
	}
	return schemas.Prefix + "reward." + partition + "." + run + "." + batch + "." + uid + ".*"
}

func randomToken() string { return strings.ToLower(rand.Text()[:16]) }
