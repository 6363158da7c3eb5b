package schemas

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// maxFaults bounds what one event's Validate reports.
const maxFaults = MaxWarnings

// faults collects what is wrong with an event. For a nested struct there is a child, which adds to
// its root under a longer path. A path is only built when there is a fault.
type faults struct {
	root   *faults
	parent *faults
	child  *faults // of which there is one at a time
	name   string
	index  int
	errs   []error
	count  int
	// checked is the type of the nested struct, if any, that passed before with the same value.
	checked reflect.Type
}

// in returns the collector of a nested struct. It is valid until the next call of in or item.
func (f *faults) in(name string) *faults { return f.item(name, -1) }

// item returns the collector of one item of a list, or of a nested struct if index is negative. It is valid until the
// next call of in or item.
func (f *faults) item(name string, index int) *faults {
	root := f.root
	if root == nil {
		root = f
	}
	if f.child == nil {
		f.child = &faults{root: root, parent: f}
	}
	f.child.name, f.child.index = name, index
	return f.child
}

// path returns the full path of a field in wire names, such as "group.reward[1].name".
func (f *faults) path(field string) string {
	for p := f; p.parent != nil; p = p.parent {
		level := p.name
		if p.index >= 0 {
			level += "[" + strconv.Itoa(p.index) + "]"
		}
		if field != "" {
			level += "."
		}
		field = level + field
	}
	return field
}

// add adds a fault: the value of a field breaks a rule.
func (f *faults) add(field, value, rule string) {
	f.fault(f.path(field) + ": " + value + "; " + rule)
}

// total returns the number of faults of the event so far.
func (f *faults) total() int {
	if f.root == nil {
		return f.count
	}
	return f.root.count
}

// fault adds a fault to the root. Beyond maxFaults it is only counted.
func (f *faults) fault(text string) {
	root := f.root
	if root == nil {
		root = f
	}
	if root.count++; root.count <= maxFaults {
		root.errs = append(root.errs, errors.New(text))
	}
}

func (f *faults) err() error {
	if f.count > maxFaults {
		return errors.Join(append(f.errs, fmt.Errorf("and %d more faults", f.count-maxFaults))...)
	}
	return errors.Join(f.errs...)
}

func (f *faults) version(v int64) {
	if v != 0 && v != Version {
		f.add("v", strconv.FormatInt(v, 10), "must be "+strconv.Itoa(Version))
	}
}

func (f *faults) token(field, s string) {
	if !legalToken(s) {
		f.add(field, quote(s), fmt.Sprintf("must be 1 to %d characters of A-Z a-z 0-9 _ -", MaxToken))
	}
}

func legalToken(s string) bool { return s != "" && len(s) <= MaxToken && isToken(s) }

func isToken(s string) bool {
	for i := range len(s) {
		if !tokenByte(s[i]) {
			return false
		}
	}
	return true
}

// sampleIndex checks that an index is below the size of its group. What the tags refuse already is not reported again.
func (f *faults) sampleIndex(index, size int64) {
	if size >= 1 && index >= size && index < MaxGroupSize {
		f.within("sample_index", index, 0, size-1)
	}
}

func (f *faults) within(field string, n, low, high int64) {
	if n < low || n > high {
		f.add(field, strconv.FormatInt(n, 10), fmt.Sprintf("must be between %d and %d", low, high))
	}
}

func formatFloat(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }

func formatFloat32(x float32) string { return strconv.FormatFloat(float64(x), 'g', -1, 32) }

// filled refuses an empty text.
func (f *faults) filled(field, s string) {
	if s == "" {
		f.add(field, quote(s), "must not be empty")
	}
}

func (f *faults) enum(field, s string, values []string) {
	if !slices.Contains(values, s) {
		f.add(field, quote(s), "must be one of "+strings.Join(values, ", "))
	}
}

// chosen refuses an empty text where one of values is needed.
func (f *faults) chosen(field, s string, values []string) {
	if s == "" {
		f.enum(field, s, values)
	}
}

func (f *faults) digest(field, s string) {
	if !isDigest(s) {
		f.add(field, quote(s), "must be a sha-256 of 64 lower-case hex digits")
	}
}

// digested refuses an empty text where a digest is needed.
func (f *faults) digested(field, s string) {
	if s == "" {
		f.digest(field, s)
	}
}

// isDigest reports whether s is a SHA-256 in lower-case hex, as all digests of events are.
func isDigest(s string) bool {
	if len(s) != 64 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// length checks the number of items of a list, and reports whether it is legal.
func (f *faults) length(field string, n, low, high int) bool {
	switch {
	case n != low && low == high:
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be %d", low))
	case n < low:
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be at least %d", low))
	case n > high:
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be at most %d", high))
	default:
		return true
	}
	return false
}

// exactly checks that a list has the length that another field gives; why is for the error.
func (f *faults) exactly(field string, n, want int, why string) bool {
	if n != want {
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be %d, %s", want, why))
	}
	return n == want
}

// inside reports the first index of a list that is not from first to last. Indices below 0 or above
// most are left out, as the check of the tag reports them.
func (f *faults) inside(field string, list []int64, first, last, most int64) {
	for i, n := range list {
		if (n < first || n > last) && n >= 0 && n <= most {
			f.add(field+"["+strconv.Itoa(i)+"]", strconv.FormatInt(n, 10), fmt.Sprintf("must be between %d and %d", first, max(last, 0)))
			return
		}
	}
}

func (f *faults) ascending(field string, list []int64) {
	for i := 1; i < len(list); i++ {
		if list[i] < list[i-1] { // one that comes twice is named by its tag
			f.add(field+"["+strconv.Itoa(i)+"]", strconv.FormatInt(list[i], 10), "must be above the one before it")
			return
		}
	}
}

// sigmas checks that a post-shift schedule [T+1] of legal sigmas falls, to 0.
func (f *faults) sigmas(list []float32) {
	if len(list) < 2 || len(list) > MaxSteps+1 {
		return // their tag says so
	}
	for i, s := range list {
		last := i == len(list)-1
		field := "sigmas[" + strconv.Itoa(i) + "]"
		switch {
		case !(s >= 0 && s <= MaxSigma):
			return // its tag says so
		case last && s != 0:
			f.add(field, formatFloat32(s), "must be 0, the end of the schedule")
		case !last && s == 0:
			f.add(field, "0", "must be above 0 and at most 1")
		case i > 0 && !(s < list[i-1]):
			f.add(field, formatFloat32(s), "must be below the one before it")
		default:
			continue
		}
		return
	}
}

// policies checks a span of policy versions.
func (f *faults) policies(oldest, newest int64) {
	if newest < oldest && newest >= 0 {
		f.add("policy_version_max", strconv.FormatInt(newest, 10), fmt.Sprintf("must not be below policy_version_min, %d", oldest))
	}
}

func (f *faults) metadata(m Metadata) {
	if err := m.Validate(); err != nil {
		f.fault(f.path("metadata") + ": " + err.Error())
	}
}
