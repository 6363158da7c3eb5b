package boot

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/schemas"
)

// Age is how long a stream keeps a message: a duration with its unit ("36h", "14d"),
// "forever", or 0 to keep the stream's own.
type Age time.Duration

const (
	forever     Age = -1
	foreverText     = "forever"
	day             = 24 * time.Hour
	// minAge is a limit of the server: a stream remembers message ids no longer than messages.
	minAge = Age(2 * time.Minute)
	// minLimit is the least size of a stream.
	minLimit = MiB
)

// String prints an age as UnmarshalText reads it.
func (a Age) String() string {
	switch {
	case a == 0:
		return "0"
	case a == forever:
		return foreverText
	case time.Duration(a)%day == 0:
		return strconv.FormatInt(int64(time.Duration(a)/day), 10) + "d"
	}
	return time.Duration(a).String()
}

// MarshalText returns String.
func (a Age) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// Type is the word for an age in the help of a flag.
func (a Age) Type() string { return "age" }

// UnmarshalText reads a duration, a number of days ("14d"), "forever", or 0; the error says so.
func (a *Age) UnmarshalText(text []byte) error {
	s := strings.TrimSpace(string(text))
	days, inDays := strings.CutSuffix(s, "d")
	switch n, err := strconv.ParseInt(days, 10, 32); {
	case s == "0":
		*a = 0
		return nil
	case s == foreverText:
		*a = forever
		return nil
	case inDays && err == nil && n > 0 && n < 36500:
		*a = Age(n) * Age(day)
		return nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || Age(d) < minAge || Age(d) >= 36500*Age(day) {
		return fmt.Errorf(`%q; must be a duration from %v to 36499d with its unit, such as "36h" or "14d", or "forever"`,
			s, time.Duration(minAge))
	}
	*a = Age(d)
	return nil
}

// Replicas is the number of servers in a cluster that keep each stream; 0: as many as now.
type Replicas int

// UnmarshalText reads a number of servers.
func (r *Replicas) UnmarshalText(text []byte) error {
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || n < 0 || n > bus.MaxReplicas {
		return fmt.Errorf("%q; must be a number of servers from 1 to %d (3 survive the loss of one), or 0 to leave "+
			"it as it is", text, bus.MaxReplicas)
	}
	*r = Replicas(n)
	return nil
}

// MarshalText returns the number.
func (r Replicas) MarshalText() ([]byte, error) { return []byte(strconv.Itoa(int(r))), nil }

// Limits are the limits of the streams and of the object store, and on how many servers they are kept. A field that
// is not set changes nothing; a new stream then has the limit of the contract. The tag names the stream.
type Limits struct {
	MaxPromptsBytes      Bytes `key:"max_prompts_bytes" stream:"MDR_PROMPTS" help:"size of MDR_PROMPTS"`
	MaxGroupsBytes       Bytes `key:"max_groups_bytes" stream:"MDR_GROUPS" help:"size of MDR_GROUPS"`
	MaxRequestsBytes     Bytes `key:"max_requests_bytes" stream:"MDR_REQUESTS" help:"size of MDR_REQUESTS, the queue of samples"`
	MaxStepsBytes        Bytes `key:"max_steps_bytes" stream:"MDR_STEPS" help:"size of MDR_STEPS, the large one"`
	MaxTrajectoriesBytes Bytes `key:"max_trajectories_bytes" stream:"MDR_TRAJECTORIES" help:"size of MDR_TRAJECTORIES"`
	MaxVerdictsBytes     Bytes `key:"max_verdicts_bytes" stream:"MDR_VERDICTS" help:"size of MDR_VERDICTS"`
	MaxUpdatesBytes      Bytes `key:"max_updates_bytes" stream:"MDR_UPDATES" help:"size of MDR_UPDATES"`
	MaxRewardsBytes      Bytes `key:"max_rewards_bytes" stream:"MDR_REWARDS" help:"size of MDR_REWARDS"`
	MaxAdvantagesBytes   Bytes `key:"max_advantages_bytes" stream:"MDR_ADVANTAGES" help:"size of MDR_ADVANTAGES"`
	MaxParkedBytes       Bytes `key:"max_parked_bytes" stream:"MDR_PARKED" help:"size of MDR_PARKED, the requests of paused runs"`
	MaxDeadBytes         Bytes `key:"max_dead_bytes" stream:"MDR_DEAD" help:"size of MDR_DEAD, which drops its oldest letters"`
	MaxBlobsBytes        Bytes `key:"max_blobs_bytes" stream:"OBJ_mdr-blobs" help:"size of the object store: images, embeddings, weights"`
	MaxPromptsAge        Age   `key:"max_prompts_age" stream:"MDR_PROMPTS" help:"how long prompts are kept, e.g. 14d or forever"`
	MaxStepsAge          Age   `key:"max_steps_age" stream:"MDR_STEPS" help:"how long steps are kept; not below the trajectories'"`
	MaxTrajectoriesAge   Age   `key:"max_trajectories_age" stream:"MDR_TRAJECTORIES" help:"how long trajectories are kept"`
	MaxVerdictsAge       Age   `key:"max_verdicts_age" stream:"MDR_VERDICTS" help:"how long verdicts are kept"`
	MaxUpdatesAge        Age   `key:"max_updates_age" stream:"MDR_UPDATES" help:"how long updates of trainers are kept"`
	MaxRewardsAge        Age   `key:"max_rewards_age" stream:"MDR_REWARDS" help:"how long rewards are kept"`
	MaxAdvantagesAge     Age   `key:"max_advantages_age" stream:"MDR_ADVANTAGES" help:"how long advantages are kept"`
	MaxDeadAge           Age   `key:"max_dead_age" stream:"MDR_DEAD" help:"how long dead letters are kept"`

	StreamReplicas Replicas `key:"stream_replicas" help:"how many servers of a cluster keep each stream: 3 survive the loss of one; new streams are on one"`
}

// Apply changes the limits that are set, of streams that exist.
func (l Limits) Apply(ctx context.Context, b *bus.Bus) error {
	if err := b.SetLimits(ctx, l.Streams()...); err != nil {
		return err
	}
	return b.SetReplicas(ctx, int(l.StreamReplicas))
}

// Any reports whether any limit is set.
func (l Limits) Any() bool { return l != Limits{} }

// Flags adds a flag for each limit, --max-steps-bytes and so on.
func (l *Limits) Flags(fs *pflag.FlagSet) { fields.Bind("", l).Register(fs) }

// Streams returns the limits that are set, by stream, in the form that the bus applies.
func (l Limits) Streams() []bus.StreamLimit {
	var out []bus.StreamLimit
	for field, v := range reflect.ValueOf(l).Fields() {
		stream := field.Tag.Get("stream")
		if v.IsZero() || stream == "" {
			continue
		}
		i := slices.IndexFunc(out, func(l bus.StreamLimit) bool { return l.Stream == stream })
		if i < 0 {
			i, out = len(out), append(out, bus.StreamLimit{Stream: stream})
		}
		switch x := v.Interface().(type) {
		case Bytes:
			out[i].MaxBytes = int64(x)
		case Age:
			out[i].MaxAge = time.Duration(x)
		}
	}
	return out
}

// Validate checks the limits of streams. It returns all faults, joined, each with the name of its field.
func (l Limits) Validate() error {
	var errs []error
	for field, v := range reflect.ValueOf(l).Fields() {
		if n, ok := v.Interface().(Bytes); ok && n != 0 && n < minLimit {
			errs = append(errs, fmt.Errorf("%s: %v; must be at least %v", field.Tag.Get("key"), n, minLimit))
		}
	}
	return errors.Join(errs...)
}

// SizeFlag returns the flag of a stream's size, "max-steps-bytes"; empty for a stream without one.
func SizeFlag(stream string) (flag string) {
	for _, f := range schemas.Fields(reflect.TypeFor[Limits]()) {
		if s, _ := reflect.TypeFor[Limits]().FieldByName(f.GoName); f.Type == reflect.TypeFor[Bytes]() &&
			s.Tag.Get("stream") == stream {
			return f.Flag
		}
	}
	return ""
}

// Scarce says that a stream has less than a fifth of its limits left, and what to do, for warnings of commands. Both
// are empty if it has more left, drops its oldest messages, or is the queue of requests, which is full while samplers
// are busy.
func Scarce(s *bus.StreamStats) (what, fix string) {
	if s.State != bus.StateNearlyFull || s.Name == schemas.StreamRequests {
		return "", ""
	}
	fix = freeOld
	if s.Name == schemas.StreamBlobBucket {
		fix = "free images and weights that no event names with 'meander gc --blobs'"
	}
	fix = moreSpace(s, 0) + fix
	return fmt.Sprintf("%s is nearly full: %s of %s", s.Name, Bytes(s.Bytes).Rough(), Bytes(s.MaxBytes).Rough()), fix
}

// freeOld says how to free space, and what goes.
const freeOld = "delete the groups that closed over a day ago with 'meander gc --gc-age 24h'"

// moreSpace says how to double the limit of a stream, and add what more is to be stored, or all that waits, if that is
// more; empty if it has no size.
func moreSpace(s *bus.StreamStats, more int64) string {
	flag := SizeFlag(s.Name)
	if flag == "" || s.MaxBytes <= 0 {
		return ""
	}
	size, unit := Bytes(max(2*s.MaxBytes+more, s.Enough)), MiB
	if size > GiB {
		unit = GiB
	}
	return fmt.Sprintf("give it more space, such as 'meander streams limit --%s %v', or ", flag,
		(size+unit-1)/unit*unit)
}

// whenFull says what a full stream does to what is new.
func whenFull(stream string) string {
	switch stream {
	case schemas.StreamPrompts, schemas.StreamVerdicts, schemas.StreamPolicies, schemas.StreamControl:
		return "; what is new is refused, and nothing stored is lost"
	}
	return "; samples wait, and nothing is lost"
}

// Advice says in one line why a stream stores nothing, and what to do. Health endpoints and commands show it.
func Advice(f bus.Fault) string {
	what, fix := Advise(f)
	return what + "; " + fix
}

// Advise is Advice in two parts: what is wrong, and what to do.
func Advise(f bus.Fault) (what, fix string) {
	if !f.Full() {
		return fmt.Sprintf("%s: the server does not do what is asked (%v)", f.Name, f.Err),
			"see its log, and make room on its disk if that is full: the server of meander then goes on by itself, " +
				"another " + "one has to be started again"
	}
	if f.OnDisk {
		return fmt.Sprintf("%s: %d samples wait for room on the server's disk, the first for %s", f.Name, f.Waiting,
			Bytes(f.Need).Rough()), "make room on its disk, it goes on by itself then"
	}
	fix = freeOld + ", or a whole run with 'meander runs rm RUN'"
	if f.Name == schemas.StreamSteps {
		fix += ". New prompts wait, too; after intake's --hold (30 minutes unless set) they are refused"
	}
	if f.Name == schemas.StreamBlobBucket {
		fix = "free images and weights that no event names with 'meander gc --blobs', those of old groups with " +
			"'meander gc --gc-age 24h', those of a run with 'meander runs rm RUN'"
	}
	if f.MaxMessages > 0 && f.Messages >= uint64(f.MaxMessages) {
		return fmt.Sprintf("%s is full: %d of %d messages", f.Name, f.Messages, f.MaxMessages) + whenFull(f.Name), fix
	}
	what = fmt.Sprintf("%s is full: %s of %s", f.Name, Bytes(f.Bytes).Rough(), Bytes(f.MaxBytes).Rough())
	if f.Refused > 0 {
		what += fmt.Sprintf(", and %s are to be stored", Bytes(f.Refused).Rough())
	}
	if f.Waiting > 0 {
		what += fmt.Sprintf(", %s kept for samples in flight; %d samples wait, the first for %s", Bytes(f.Held).Rough(),
			f.Waiting, Bytes(f.Need).Rough())
	}
	return what + whenFull(f.Name), moreSpace(&f.StreamStats, f.Refused+f.Need) + fix
}

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
