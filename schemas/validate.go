package schemas

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxFaults bounds what one event's Validate reports.
const maxFaults = 32

// faults collects what is wrong with an event. A child writes into its root, under a
// longer path; paths are only put together when there is a fault.
type faults struct {
	root   *faults
	parent *faults
	name   string
	index  int
	errs   []error
	count  int
}

// in is the collector of a nested struct.
func (f *faults) in(name string) *faults { return f.item(name, -1) }

// item is the collector of one element of a list.
func (f *faults) item(name string, index int) *faults {
	root := f.root
	if root == nil {
		root = f
	}
	return &faults{root: root, parent: f, name: name, index: index}
}

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

// add notes that field has a value that breaks a rule.
func (f *faults) add(field, value, rule string) {
	f.fault(f.path(field) + ": " + value + "; " + rule)
}

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
	if s == "" || len(s) > MaxToken || !isToken(s) {
		f.add(field, quote(s), fmt.Sprintf("must be 1 to %d characters of A-Z a-z 0-9 _ -", MaxToken))
	}
}

func isToken(s string) bool {
	for i := range len(s) {
		if !tokenByte(s[i]) {
			return false
		}
	}
	return true
}

// sample checks the fields that name one sample.
func (f *faults) sample(run, uid string, index, size int64) {
	f.token("run", run)
	f.token("uid", uid)
	f.within("group_size", size, 1, MaxGroupSize)
	if size < 1 || size > MaxGroupSize {
		size = MaxGroupSize
	}
	f.within("sample_index", index, 0, size-1)
}

func (f *faults) within(field string, n, low, high int64) {
	if n < low || n > high {
		f.add(field, strconv.FormatInt(n, 10), fmt.Sprintf("must be between %d and %d", low, high))
	}
}

func (f *faults) notNegative(field string, n int64) {
	if n < 0 {
		f.add(field, strconv.FormatInt(n, 10), "must not be negative")
	}
}

func (f *faults) positive(field string, n int64) {
	if n < 1 {
		f.add(field, strconv.FormatInt(n, 10), "must be positive")
	}
}

// number refuses what is outside the range, and infinities and NaN always.
func (f *faults) number(field string, x, low, high float64) {
	if !(x >= low && x <= high) {
		f.add(field, formatFloat(x), fmt.Sprintf("must be between %s and %s", formatFloat(low), formatFloat(high)))
	}
}

func (f *faults) finite(field string, x float64) {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		f.add(field, formatFloat(x), "must be finite")
	}
}

// finiteOrNull is finite for a value that may be absent.
func (f *faults) finiteOrNull(field string, x *float64) {
	if x != nil {
		f.finite(field, *x)
	}
}

func formatFloat(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }

func formatFloat32(x float32) string { return strconv.FormatFloat(float64(x), 'g', -1, 32) }

func (f *faults) text(field, s string, low, high int) {
	switch {
	case len(s) < low:
		f.add(field, quote(s), "must not be empty")
	case len(s) > high:
		f.add(field, strconv.Itoa(len(s))+" bytes", fmt.Sprintf("must be at most %d", high))
	case !utf8.ValidString(s):
		f.add(field, quote(s), "must be UTF-8")
	}
}

func (f *faults) enum(field, s string, values []string) {
	if !slices.Contains(values, s) {
		f.add(field, quote(s), "must be one of "+strings.Join(values, ", "))
	}
}

// optionalEnum is enum for a field whose absence means its default.
func (f *faults) optionalEnum(field, s string, values []string) {
	if s != "" {
		f.enum(field, s, values)
	}
}

func (f *faults) digest(field, s string) {
	if !isDigest(s) {
		f.add(field, quote(s), "must be a sha-256 of 64 lower-case hex digits")
	}
}

// optionalDigest is digest for a field that may be empty.
func (f *faults) optionalDigest(field, s string) {
	if s != "" {
		f.digest(field, s)
	}
}

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

// length checks the number of items of a list and says whether to look at them.
func (f *faults) length(field string, n, low, high int) bool {
	switch {
	case n < low:
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be at least %d", low))
	case n > high:
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be at most %d", high))
	default:
		return true
	}
	return false
}

// exactly is length for a list whose length another field gives.
func (f *faults) exactly(field string, n, want int, why string) bool {
	if n != want {
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be %d, %s", want, why))
	}
	return n == want
}

// indices checks that every item is from 0 to last and comes once.
func (f *faults) indices(field string, list []int64, last int64) {
	if !f.length(field, len(list), 0, MaxSteps+1) {
		return
	}
	last = min(last, MaxSteps) // a schedule that is too long is its own fault
	var seen [MaxSteps + 1]bool
	for i, n := range list {
		switch {
		case n < 0 || n > last:
			f.add(field+"["+strconv.Itoa(i)+"]", strconv.FormatInt(n, 10), fmt.Sprintf("must be between 0 and %d", last))
		case seen[n]:
			f.add(field+"["+strconv.Itoa(i)+"]", strconv.FormatInt(n, 10), "must come once")
		default:
			seen[n] = true
		}
	}
}

func (f *faults) ascending(field string, list []int64) {
	for i := 1; i < len(list); i++ {
		if list[i] <= list[i-1] {
			f.add(field+"["+strconv.Itoa(i)+"]", strconv.FormatInt(list[i], 10), "must be above the one before it")
			return
		}
	}
}

// sigmas checks a post-shift schedule [T+1], ending at 0.
func (f *faults) sigmas(list []float32) {
	if !f.length("sigmas", len(list), 2, MaxSteps+1) {
		return
	}
	for i, s := range list {
		last := i == len(list)-1
		field := "sigmas[" + strconv.Itoa(i) + "]"
		switch {
		case last && s != 0:
			f.add(field, formatFloat32(s), "must be 0, the end of the schedule")
		case !last && !(s > 0 && s <= MaxSigma):
			f.add(field, formatFloat32(s), "must be above 0 and at most 1")
		case i > 0 && !(s < list[i-1]):
			f.add(field, formatFloat32(s), "must be below the one before it")
		default:
			continue
		}
		return
	}
}

func (f *faults) transitions(list []string) {
	for i, t := range list {
		if !slices.Contains(SDETypes, t) {
			f.enum("transitions["+strconv.Itoa(i)+"]", t, SDETypes)
			return
		}
	}
}

func (f *faults) names(field string, list, values []string) {
	if !f.length(field, len(list), 0, len(values)) {
		return
	}
	for i, s := range list {
		name := field + "[" + strconv.Itoa(i) + "]"
		f.enum(name, s, values)
		if slices.Contains(list[:i], s) {
			f.add(name, quote(s), "must come once")
		}
	}
}

// policies checks a span of policy versions.
func (f *faults) policies(oldest, newest int64) {
	f.notNegative("policy_version_min", oldest)
	if newest < oldest {
		f.add("policy_version_max", strconv.FormatInt(newest, 10), fmt.Sprintf("must not be below policy_version_min, %d", oldest))
	}
}

func (f *faults) metadata(m Metadata) {
	if err := m.Validate(); err != nil {
		f.fault(f.path("metadata") + ": " + err.Error())
	}
}
