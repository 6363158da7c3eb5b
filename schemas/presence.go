package schemas

// Presence says that a service runs now, with its abilities. Each instance renews its own
// in the key-value bucket PresenceBucket, from where it goes when it is not renewed: what
// is there is alive.
type Presence struct {
	V int64 `msgpack:"v"`
	// Service is sampler, reward, intake (while prompts wait there for space), or starting (a sampler that waits for
	// its server), Instance names the process among others.
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
	// PolicyVersion is the version of the weights that a sampler begins samples with, WeightsDigest
	// names them; Loading is the version that it is about to take over.
	PolicyVersion *int64 `msgpack:"policy_version,omitempty" range:"0.."`
	WeightsDigest string `msgpack:"weights_digest,omitempty" size:"0..MaxName"`
	Loading       *int64 `msgpack:"loading,omitempty" range:"0.."`
	// Tenants are those who have weights of their own on the sampler's lane, besides main.
	Tenants []TenantServing `msgpack:"tenants,omitempty" size:"0..MaxTenants"`
	// Waiting is why a starting sampler does not serve its lane yet, or why one that serves it makes no samples now. Of
	// a reward service it says which functions gave no answer when they were asked last, and why.
	Waiting string `msgpack:"waiting,omitempty" size:"0..MaxText,cut"`
	// Draining says that it finishes the work in flight and begins no new work.
	Draining bool `msgpack:"draining,omitempty"`
	// Room is what a sampler takes of MDR_STEPS, or what prompts wait for there at an intake; absent: nothing.
	Room *Room `msgpack:"room,omitempty"`
	// Making are the samples that a sampler has in hand as of this entry, or that an intake holds back until there is
	// space.
	Making []Making `msgpack:"making,omitempty" size:"0..MaxMaking"`
	// Backend names what a sampler computes on.
	Backend string `msgpack:"backend,omitempty" size:"0..MaxName"`
	// Evaluation is a sampler's newest evaluation of its model; absent: there was none yet.
	Evaluation *Evaluation `msgpack:"evaluation,omitempty"`
	// At is when it was renewed, Unix nanoseconds.
	At int64 `msgpack:"at" range:"0.."`
}

// TenantServing says which version of a tenant's weights a sampler begins samples with, as the same fields of Presence
// do for main.
type TenantServing struct {
	Tenant        Tenant `msgpack:"tenant" form:"token"`
	PolicyVersion int64  `msgpack:"policy_version" range:"0.."`
	WeightsDigest string `msgpack:"weights_digest" size:"0..MaxName"`
	// Loading is the version that it is about to take over.
	Loading *int64 `msgpack:"loading,omitempty" range:"0.."`
}

// Serving returns what a sampler serves of a tenant of its lane; without PolicyVersion if it does not say.
func (e *Presence) Serving(tenant Tenant) Presence {
	out := *e
	if tenant == TenantMain || tenant == "" {
		return out
	}
	out.PolicyVersion, out.WeightsDigest, out.Loading = nil, "", nil
	for _, t := range e.Tenants {
		if t.Tenant == tenant {
			out.PolicyVersion, out.WeightsDigest, out.Loading = &t.PolicyVersion, t.WeightsDigest, t.Loading
		}
	}
	return out
}

// Evaluation is one evaluation of a model for a micro-batch.
type Evaluation struct {
	// Samples is how many it was for, of the Places that a micro-batch has.
	Samples int64 `msgpack:"samples" range:"1.."`
	Places  int64 `msgpack:"places" range:"1.."`
	// TookNS is its time in nanoseconds, At when it ended, Unix nanoseconds.
	TookNS int64 `msgpack:"took_ns" range:"0.."`
	At     int64 `msgpack:"at" range:"0.."`
}

// Making is a sample that a sampler or an intake has in hand, or with the index -1 all samples of its group.
type Making struct {
	Run         Run   `msgpack:"run" form:"token"`
	UID         UID   `msgpack:"uid" form:"token"`
	SampleIndex int64 `msgpack:"sample_index" range:"-1.."`
}

// MissingReward is a reward function that cannot be served.
type MissingReward struct {
	Name string `msgpack:"name" form:"reward_name"`
	// Reason says what to install or to configure.
	Reason string `msgpack:"reason" size:"1..MaxText,cut"`
}

// Room is the part of MDR_STEPS that a sampler has claimed. The claims of all samplers
// together are what may still be stored by samples that have begun, so that none begins
// that could not end.
type Room struct {
	// Held is the bytes that its samples in flight may store, from their first step to their last.
	Held int64 `msgpack:"held" range:"0.."`
	// Wants is the bytes that it waits for. Who waits, waits in the order of Turn, the revision
	// of the entry in which it began to; 0: the revision of this one.
	Wants int64  `msgpack:"wants,omitempty" range:"0.."`
	Turn  uint64 `msgpack:"turn,omitempty"`
	// Waiting is the samples that wait, the first of them for Need bytes, and Since when, Unix
	// nanoseconds.
	Waiting int64 `msgpack:"waiting,omitempty" range:"0.."`
	Need    int64 `msgpack:"need,omitempty" range:"0.."`
	Since   int64 `msgpack:"since,omitempty" range:"0.."`
	// Disk says that the disk of the server lacks the room, not the stream.
	Disk bool `msgpack:"disk,omitempty"`
	// Enough is the limit of the stream, in bytes, that would be enough for all that is begun and that waits, as an
	// intake knows it; 0: not known.
	Enough int64 `msgpack:"enough,omitempty" range:"0.."`
}

// The services of a Presence.
const (
	ServiceSampler  = "sampler"
	ServiceReward   = "reward"
	ServiceStarting = "starting"
)

// PresenceSubject returns the subject under which PresenceBucket keeps the entry of an instance.
func PresenceSubject(instance string) string { return BucketSubject(PresenceBucket, instance) }

// checkRules checks that a sampler has a lane, that no other service has one, and that a reward service has no room.
func (e *Presence) checkRules(f *faults) {
	if e.Service == ServiceSampler || e.Service == ServiceStarting {
		if e.Lane == "" {
			f.checkToken("lane", string(e.Lane))
		}
		return
	}
	if e.Lane != "" {
		f.add("lane", quote(string(e.Lane)), "must be empty but for a sampler")
	}
	if e.Room != nil && e.Service != ServiceIntake {
		f.add("room", "present", "must be absent but for a sampler or an intake")
	}
}

// What a step event takes in MDR_STEPS without its tensors: the least, subject, headers and the
// server's own part included, and how often a name of the run, the group and the process stands in it.
// What a tensor adds to its elements, and a part to its bytes. Measured; a bound, see
// TestRoom_BytesOfSteps.
const (
	stepEventBytes = 860
	tensorBytes    = 190
	partBytes      = 420
	idCopies       = 3 // in the subject, the message id and the event
)

// StepBytes returns the most bytes that the steps of the sample take in MDR_STEPS, on a lane that serves p. For images
// with short names it is at most a fifth more than they really take.
func (e *Request) StepBytes(p *Policy) int64 {
	if e.Text != nil {
		return e.textBytes(p)
	}
	elements := p.StateElements(e.Frames, e.Height, e.Width)
	begin, end := e.Segment()
	item, _ := DTypeSize(e.LatentsDType)
	names := int64(idCopies * (len(e.Run) + len(e.UID)))
	tensor := func(bytes int64) int64 {
		return bytes + tensorBytes + (bytes/MaxPartBytes+1)*(partBytes+names)*min(1, bytes/smallTensor)
	}
	debug := int64(0)
	for _, name := range e.Debug {
		if name == "std" { // a single number
			debug += tensor(4)
		} else {
			debug += tensor(4 * elements)
		}
	}
	return int64(len(e.ReturnStepIndices)+len(e.CheckpointStepIndices))*tensor(item*elements) +
		(end-begin)*(stepEventBytes+names+debug)
}

// MaxReplyTokens bounds the tokens of a reply in its template, of tokenizers that work on bytes.
const MaxReplyTokens = MaxPromptBytes + MaxTokensPerEvent

// smallTensor is below what a tensor is never sent in parts.
const smallTensor = MaxPartBytes / 4

// What an event of tokens takes without its logits: the least, and of each token in it.
const (
	tokensEventBytes = 1000
	tokenBytes       = 32
)

// EventCount returns the most events of tokens that a sample of text can have, whatever the model.
func (e *TextRequest) EventCount() int64 {
	events, _ := e.maxEvents(MaxTokens)
	return events
}

// Tokens returns the most tokens that a sample can have on a model with the given context.
func (e *TextRequest) Tokens(context int64) int64 {
	replies := (e.Answers() - 1) * min(MaxReplyTokens, context)
	return min(e.PromptTokens()+e.Answers()*e.MaxNewTokens+replies, context+e.Answers())
}

// maxEvents returns the most events that a sample can have on a model with the given context: all, and those with
// logits.
func (e *TextRequest) maxEvents(context int64) (events, withLogits int64) {
	chunks := func(n, size int64) int64 { return (n + size - 1) / size }
	prompt, reply := min(e.PromptTokens(), context), min(MaxReplyTokens, context)
	drawn := func(answers int64) int64 {
		return min(answers*max(1, chunks(e.MaxNewTokens, e.TokensPerEvent)), context/e.TokensPerEvent+answers)
	}
	stored := int64(0)
	for answer := range e.Answers() {
		if e.StoresLogits(answer) {
			stored++
		}
	}
	return chunks(prompt, MaxTokensPerEvent) + drawn(e.Answers()) + (e.Answers()-1)*chunks(reply, MaxTokensPerEvent) +
		1, drawn(stored)
}

// textBytes is StepBytes for a sample of text.
func (e *Request) textBytes(p *Policy) int64 {
	t, names, context := e.Text, int64(idCopies*(len(e.Run)+len(e.UID))), int64(MaxTokens)
	if p.Text != nil {
		context = p.Text.MaxTokens
	}
	events, withLogits := t.maxEvents(context)
	logits := t.LogitsBytes() * t.TokensPerEvent
	if logits > 0 {
		logits += 2*tensorBytes + (logits/MaxPartBytes+2)*(partBytes+names)*min(1, logits/smallTensor)
	}
	return events*(tokensEventBytes+names) + tokenBytes*t.Tokens(context) + withLogits*logits
}
