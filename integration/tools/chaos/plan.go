// Package chaos hurts a pipeline under load and audits what it has stored: its programs and its
// server are killed, paused and restarted, the network between them delays, cuts and freezes, and
// the server's disk runs full, as drawn from a seed. TestChaos is the whole of it; `make chaos`
// runs it with a hundred faults.
package chaos

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Kind is a kind of fault.
type Kind string

// The kinds of faults.
const (
	Kill          Kind = "program killed"       // SIGKILL
	Pause         Kind = "program paused"       // SIGSTOP for longer than the ack wait, then SIGCONT
	Restart       Kind = "program restarted"    // SIGTERM
	ServerKill    Kind = "server killed"        // SIGKILL
	ServerPause   Kind = "server paused"        // SIGSTOP, SIGCONT
	ServerRestart Kind = "server restarted"     // SIGTERM
	Latency       Kind = "network slow"         // every chunk is late
	Cut           Kind = "network cut"          // connections reset, others refused for a while
	HalfOpen      Kind = "network half-open"    // connections that carry nothing any more, and stay
	SlowReader    Kind = "program reads slowly" // what it gets piles up in the server
	DiskFull      Kind = "disk full"            // of the server, which is restarted once there is room
)

// pack is how often each kind comes before the next pack is shuffled.
var pack = []struct {
	kind  Kind
	times int
}{
	{Kill, 5},
	{Pause, 3},
	{Restart, 2},
	{ServerKill, 2},
	{ServerPause, 1},
	{ServerRestart, 1},
	{Latency, 1},
	{Cut, 2},
	{HalfOpen, 1},
	{SlowReader, 1},
	{DiskFull, 1},
}

// Kinds are all kinds of faults.
func Kinds() []Kind {
	kinds := make([]Kind, len(pack))
	for i := range pack {
		kinds[i] = pack[i].kind
	}
	return kinds
}

// Fault is one fault: what happens, to which of the programs, when, and for how long.
type Fault struct {
	Kind   Kind
	After  time.Duration // since the one before
	Victim int           // index of the program; none of the server's
	Length time.Duration // of what lasts
	Delay  time.Duration // per chunk, of what is slow
	Told   bool          // of what is half-open: the program sees the connection end
}

// String is what the log says of it, the program's name aside.
func (f Fault) String() string {
	switch f.Kind {
	case Latency, SlowReader:
		return fmt.Sprintf("%s, %v each time for %v", f.Kind, f.Delay, f.Length)
	case Pause, ServerPause, Cut, DiskFull:
		return fmt.Sprintf("%s for %v", f.Kind, f.Length)
	case HalfOpen:
		return fmt.Sprintf("%s, the program told: %t", f.Kind, f.Told)
	}
	return string(f.Kind)
}

// Plan draws n faults for a number of programs. What one seed gives is always the same: each kind
// and each program has its share, in an order that is shuffled anew. Pauses last longer than the ack
// wait.
func Plan(seed uint64, n, programs int, ackWait time.Duration, without ...Kind) []Fault {
	r := rand.New(rand.NewPCG(seed, 0))
	between := func(least, most time.Duration) time.Duration {
		return (least + time.Duration(r.Int64N(int64(most-least)))).Round(time.Millisecond)
	}
	var plan []Fault
	var kinds []Kind
	var victims []int
	for len(plan) < n {
		if len(kinds) == 0 {
			kinds = shuffled(r, without)
		}
		if len(victims) == 0 {
			victims = r.Perm(programs)
		}
		f := Fault{
			Kind: kinds[0], Victim: victims[0], After: between(250*time.Millisecond, 500*time.Millisecond),
			Delay: between(20*time.Millisecond, 150*time.Millisecond), Told: r.IntN(2) == 0,
		}
		switch f.Kind {
		case Pause, ServerPause:
			f.Length = ackWait + between(200*time.Millisecond, 1200*time.Millisecond)
		case Cut:
			f.Length = between(0, time.Second)
		default:
			f.Length = between(time.Second, 3*time.Second)
		}
		kinds = kinds[1:]
		if !f.Kind.OfServer() {
			victims = victims[1:]
		}
		plan = append(plan, f)
	}
	return plan
}

// shuffled is a pack without some kinds.
func shuffled(r *rand.Rand, without []Kind) []Kind {
	var kinds []Kind
	for _, p := range pack {
		for range p.times {
			if !slices.Contains(without, p.kind) {
				kinds = append(kinds, p.kind)
			}
		}
	}
	r.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
	return kinds
}

// OfServer says whether a fault is the server's, and no program's.
func (k Kind) OfServer() bool {
	switch k {
	case ServerKill, ServerPause, ServerRestart, DiskFull:
		return true
	}
	return false
}
