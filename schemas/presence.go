package schemas

// Presence says that a service runs now, and what it can do. Each instance renews its own
// in the key-value bucket PresenceBucket, from where it goes when it is not renewed: what
// is there is alive.
type Presence struct {
	V int64 `msgpack:"v"`
	// Service is sampler or reward, Instance names the process among others.
	Service  string `msgpack:"service" enum:"PresentServices"`
	Instance string `msgpack:"instance" form:"token"`
	// Lane is the lane that a sampler serves.
	Lane Lane `msgpack:"lane,omitempty" form:"token"`
	// Reward lists the functions that a reward service has; it has any nats:NAME besides.
	Reward []string `msgpack:"reward,omitempty" size:"0..MaxPresentRewards" form:"reward_name"`
	// Missing are functions that it knows and cannot serve, and why.
	Missing []MissingReward `msgpack:"missing,omitempty" size:"0..MaxPresentRewards"`
	// Controls is the sequence of the newest control that a sampler obeys: of what it and those
	// before it stopped, no step is taken, and none is on its way to be stored.
	Controls uint64 `msgpack:"controls,omitempty"`
	// At is when it was renewed, Unix nanoseconds.
	At int64 `msgpack:"at" range:"0.."`
}

// MissingReward is a reward function that cannot be served.
type MissingReward struct {
	Name string `msgpack:"name" form:"reward_name"`
	// Reason says what to install or to configure.
	Reason string `msgpack:"reason" size:"1..MaxText"`
}

// The services of a Presence.
const (
	ServiceSampler = "sampler"
	ServiceReward  = "reward"
)

// PresenceSubject is the key of an instance in the bucket, as a subject.
func PresenceSubject(instance string) string { return BucketSubject(PresenceBucket, instance) }

// Validate joins every fault of the presence.
func (e *Presence) Validate() error { return CheckFields(e) }

func (e *Presence) rules(f *faults) {
	if e.Service == ServiceSampler {
		if e.Lane == "" {
			f.token("lane", string(e.Lane))
		}
	} else if e.Lane != "" {
		f.add("lane", quote(string(e.Lane)), "must be empty but for a sampler")
	}
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
