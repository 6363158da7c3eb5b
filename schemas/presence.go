package schemas

import "strconv"

// Presence says that a service runs now, and what it can do. Each instance renews its own
// in the key-value bucket PresenceBucket, from where it goes when it is not renewed: what
// is there is alive.
type Presence struct {
	V int64 `msgpack:"v"`
	// Service is sampler or reward, Instance names the process among others.
	Service  string `msgpack:"service"`
	Instance string `msgpack:"instance"`
	// Lane is the lane that a sampler serves.
	Lane string `msgpack:"lane,omitempty"`
	// Reward lists the functions that a reward service has; it has any nats:NAME besides.
	Reward []string `msgpack:"reward,omitempty"`
	// Missing are functions that it knows and cannot serve, and why.
	Missing []MissingReward `msgpack:"missing,omitempty"`
	// At is when it was renewed, Unix nanoseconds.
	At int64 `msgpack:"at"`
}

// MissingReward is a reward function that cannot be served.
type MissingReward struct {
	Name string `msgpack:"name"`
	// Reason says what to install or to configure.
	Reason string `msgpack:"reason"`
}

// The services of a Presence.
const (
	ServiceSampler = "sampler"
	ServiceReward  = "reward"
)

// PresenceSubject is the key of an instance in the bucket, as a subject.
func PresenceSubject(instance string) string { return "$KV." + PresenceBucket + "." + instance }

// Validate joins every fault of the presence.
func (e *Presence) Validate() error {
	var f faults
	f.version(e.V)
	f.enum("service", e.Service, PresentServices)
	f.token("instance", e.Instance)
	if e.Service == ServiceSampler {
		f.token("lane", e.Lane)
	} else if e.Lane != "" {
		f.add("lane", quote(e.Lane), "must be empty but for a sampler")
	}
	if f.length("reward", len(e.Reward), 0, MaxPresentRewards) {
		for i, name := range e.Reward {
			f.rewardName("reward["+strconv.Itoa(i)+"]", name)
		}
	}
	if f.length("missing", len(e.Missing), 0, MaxPresentRewards) {
		for i, m := range e.Missing {
			g := f.item("missing", i)
			g.rewardName("name", m.Name)
			g.text("reason", m.Reason, 1, MaxText)
		}
	}
	f.notNegative("at", e.At)
	return f.err()
}

func (e *Presence) repair() {
	missing := make([]MissingReward, len(e.Missing))
	for i, m := range e.Missing {
		missing[i] = MissingReward{m.Name, legalText(m.Reason, MaxText)}
	}
	if e.Missing != nil {
		e.Missing = missing
	}
}
