package schemas

import (
	"errors"
	"fmt"
	"io/fs"
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

// inStruct returns the collector of a nested struct. It is valid until the next call of in or item.
func (f *faults) inStruct(name string) *faults { return f.inItem(name, -1) }

// inItem returns the collector of one item of a list, or of a nested struct if index is negative. It is valid until the
// next call of in or item.
func (f *faults) inItem(name string, index int) *faults {
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

// fullPath returns the full path of a field in wire names, such as "group.reward[1].name".
func (f *faults) fullPath(field string) string {
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
	f.addToRoot(f.fullPath(field) + ": " + value + "; " + rule)
}

// countFaults returns the number of faults of the event so far.
func (f *faults) countFaults() int {
	if f.root == nil {
		return f.count
	}
	return f.root.count
}

// addToRoot adds a fault to the root. Beyond maxFaults it is only counted.
func (f *faults) addToRoot(text string) {
	root := f.root
	if root == nil {
		root = f
	}
	if root.count++; root.count <= maxFaults {
		root.errs = append(root.errs, errors.New(text))
	}
}

func (f *faults) joined() error {
	if f.count > maxFaults {
		return errors.Join(append(f.errs, fmt.Errorf("and %d more faults", f.count-maxFaults))...)
	}
	return errors.Join(f.errs...)
}

func (f *faults) checkVersion(v int64) {
	if v != 0 && v != Version {
		f.add("v", strconv.FormatInt(v, 10), "must be "+strconv.Itoa(Version))
	}
}

func (f *faults) checkToken(field, s string) { f.checkShortToken(field, s, MaxToken) }

// checkShortToken is checkToken for a token of at most so many characters.
func (f *faults) checkShortToken(field, s string, most int) {
	if !legalToken(s) || len(s) > most {
		f.add(field, quote(s), fmt.Sprintf("must be 1 to %d characters of A-Z a-z 0-9 _ -", most))
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

// checkSampleIndex checks that an index is below the size of its group. What the tags refuse already is not reported
// again.
func (f *faults) checkSampleIndex(index, size int64) {
	if size >= 1 && index >= size && index < MaxGroupSize {
		f.checkWithin("sample_index", index, 0, size-1)
	}
}

func (f *faults) checkWithin(field string, n, low, high int64) {
	if n < low || n > high {
		f.add(field, strconv.FormatInt(n, 10), fmt.Sprintf("must be between %d and %d", low, high))
	}
}

func formatFloat(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }

func formatFloat32(x float32) string { return strconv.FormatFloat(float64(x), 'g', -1, 32) }

// requireText refuses an empty text.
func (f *faults) requireText(field, s string) {
	if s == "" {
		f.add(field, quote(s), "must not be empty")
	}
}

func (f *faults) checkEnum(field, s string, values []string) {
	if !slices.Contains(values, s) {
		f.add(field, quote(s), "must be one of "+strings.Join(values, ", "))
	}
}

// requireOneOf refuses an empty text where one of values is needed.
func (f *faults) requireOneOf(field, s string, values []string) {
	if s == "" {
		f.checkEnum(field, s, values)
	}
}

// isDigest reports whether a text is a SHA-256 or, where form allows it, a digest by another algorithm.
func isDigest(s, form string) bool {
	return SHA256.isDigest(s) || form == FormDigest && BLAKE3.isDigest(s)
}

// refuseDigest adds the fault of a text that is not a digest of the form.
func (f *faults) refuseDigest(field, s, form string) {
	rule := SHA256.rule()
	if form == FormDigest {
		rule = BLAKE3.rule() + ", or " + rule
	}
	f.add(field, quote(s), "must be "+rule)
}

// requireDigest refuses an empty text where a digest is needed.
func (f *faults) requireDigest(field, s, form string) {
	if s == "" {
		f.refuseDigest(field, s, form)
	}
}

// isPath reports whether s is a path below some folder: relative, clean, and the same on all systems.
func isPath(s string) bool {
	return len(s) <= MaxPath && s != "." && fs.ValidPath(s) &&
		!strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == '\\' })
}

// checkLength checks the number of items of a list, and reports whether it is legal.
func (f *faults) checkLength(field string, n, low, high int) bool {
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

// requireLength checks that a list has the length that another field gives; why is for the error.
func (f *faults) requireLength(field string, n, want int, why string) bool {
	if n != want {
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be %d, %s", want, why))
	}
	return n == want
}

// checkIndices reports the first index of a list that is not from first to last. Indices below 0 or above
// most are left out, as the check of the tag reports them.
func (f *faults) checkIndices(field string, list []int64, first, last, most int64) {
	for i, n := range list {
		if (n < first || n > last) && n >= 0 && n <= most {
			f.add(field+"["+strconv.Itoa(i)+"]", strconv.FormatInt(n, 10),
				fmt.Sprintf("must be between %d and %d", first, max(last, 0)))
			return
		}
	}
}

func (f *faults) checkAscending(field string, list []int64) {
	for i := 1; i < len(list); i++ {
		if list[i] < list[i-1] { // one that comes twice is named by its tag
			f.add(field+"["+strconv.Itoa(i)+"]", strconv.FormatInt(list[i], 10), "must be above the one before it")
			return
		}
	}
}

// checkSigmas checks that a post-shift schedule [T+1] of legal sigmas falls, to 0 unless its end is open.
func (f *faults) checkSigmas(list []float32, open bool) {
	if len(list) < 2 || len(list) > MaxSteps+1 {
		return // their tag says so
	}
	for i, s := range list {
		last := i == len(list)-1
		field := "sigmas[" + strconv.Itoa(i) + "]"
		switch {
		case !(s >= 0 && s <= MaxSigma):
			return // its tag says so
		case last && s != 0 && !open:
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

// checkPolicySpan checks a span of policy versions.
func (f *faults) checkPolicySpan(oldest, newest int64) {
	if newest < oldest && newest >= 0 {
		f.add("policy_version_max", strconv.FormatInt(newest, 10),
			fmt.Sprintf("must not be below policy_version_min, %d", oldest))
	}
}

func (f *faults) checkMetadata(m Metadata) {
	if err := m.Validate(); err != nil {
		f.addToRoot(f.fullPath("metadata") + ": " + err.Error())
	}
}
