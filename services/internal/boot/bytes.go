package boot

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Bytes is a size in bytes that is written with its unit: "512B", "64MiB", "1.5GiB".
// KB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB powers of 1024.
type Bytes int64

// Binary units.
const (
	KiB Bytes = 1 << 10
	MiB Bytes = 1 << 20
	GiB Bytes = 1 << 30
	TiB Bytes = 1 << 40
)

// sizeUnits has longer names before their suffixes, so that "KiB" is not read as "B".
var sizeUnits = []struct {
	name string
	size float64
}{
	{"KiB", float64(KiB)},
	{"MiB", float64(MiB)},
	{"GiB", float64(GiB)},
	{"TiB", float64(TiB)},
	{"KB", 1e3},
	{"MB", 1e6},
	{"GB", 1e9},
	{"TB", 1e12},
	{"B", 1},
}

// binaryUnits are the largest first.
var binaryUnits = []struct {
	name string
	size Bytes
}{{"TiB", TiB}, {"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}}

// String prints the size in the largest binary unit that divides it, in the form that UnmarshalText reads.
func (b Bytes) String() string {
	for _, u := range binaryUnits {
		if b != 0 && b%u.size == 0 {
			return strconv.FormatInt(int64(b/u.size), 10) + u.name
		}
	}
	return strconv.FormatInt(int64(b), 10) + "B"
}

// Rough prints the size to a tenth of its largest unit, for people.
func (b Bytes) Rough() string {
	for _, u := range binaryUnits {
		if b >= u.size {
			return fmt.Sprintf("%.1f %s", float64(b)/float64(u.size), u.name)
		}
	}
	return fmt.Sprintf("%d B", int64(b))
}

// MarshalText returns String.
func (b Bytes) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

// Type is the word for a size in the help of a flag.
func (b Bytes) Type() string { return "size" }

// UnmarshalText reads a non-negative number and a unit. A number without a unit is
// refused unless it is 0: bytes, kilobytes and MiB are too easily taken for each other.
func (b *Bytes) UnmarshalText(text []byte) error {
	s := strings.TrimSpace(string(text))
	if s == "0" {
		*b = 0
		return nil
	}
	for _, u := range sizeUnits {
		number, ok := strings.CutSuffix(s, u.name)
		if !ok {
			continue
		}
		number = strings.TrimSpace(number)
		if n, err := strconv.ParseInt(number, 10, 64); err == nil && u.size == 1 && n >= 0 {
			*b = Bytes(n) // beyond 2^53 a float would lose bytes
			return nil
		}
		x, err := strconv.ParseFloat(number, 64)
		if err != nil || !(x >= 0) || strings.ContainsAny(number, "xXpP_") {
			break
		}
		x *= u.size
		if x >= math.MaxInt64 || x != math.Trunc(x) {
			return fmt.Errorf("%q; must be a whole number of bytes below 8 EiB", s)
		}
		*b = Bytes(x)
		return nil
	}
	return fmt.Errorf(`%q; must be a size with its unit, such as "64MiB"`, s)
}
