package schemas

import (
	"slices"
	"strings"
	"time"
)

// BucketSpec is the one description of a key-value bucket, or of the object store: the admin role creates it from
// this.
type BucketSpec struct {
	Name, Purpose string
	// Owner is the service that writes it, ownerClient, or empty: all of them. Schema is the type of its entries;
	// empty: they are no events.
	Owner, Schema string
	// Objects: it is the object store.
	Objects bool
	// History is how many values it keeps of a key; TTL for how long, 0: for ever.
	History  uint8
	TTL      time.Duration
	MaxBytes int64
}

// ownerClient owns what people and trainers write.
const ownerClient = "client"

// Buckets returns every bucket.
func Buckets() []BucketSpec {
	const mib, history = 1 << 20, 5
	return []BucketSpec{
		{
			Name: RunBucket, Purpose: "what each run was started with, and what people note of it", Owner: ownerClient,
			History: history, MaxBytes: 64 * mib,
		},
		{
			Name: CountBucket, Purpose: "the counts of each run, and how far they go", Owner: ServiceIntake, History: 1,
			MaxBytes: 64 * mib,
		},
		{
			Name: PolicyBucket, Purpose: "the weights that each lane serves", Owner: ServiceSampler, Schema: TypePolicy,
			History: history, MaxBytes: 64 * mib,
		},
		{
			Name: SealBucket, Purpose: "the secret with which samplers seal steps", Owner: ServiceSampler, History: 1,
			MaxBytes: mib,
		},
		{
			Name: PresenceBucket, Purpose: "the services that run, with their abilities", Schema: TypePresence,
			TTL: PresenceTTL, MaxBytes: 8 * mib,
		},
		{
			Name: ControlBucket, Purpose: "the control that holds of each run, group and sample", Owner: ServiceIntake,
			Schema: TypeControl, History: 1, MaxBytes: 64 * mib,
		},
		{
			Name: LeaseBucket, Purpose: "the lanes that a trainer has to itself", Owner: ownerClient, TTL: LeaseTTL,
			MaxBytes: mib,
		},
		{
			Name: BlobBucket, Purpose: "images, embeddings and weights by their sha-256", Objects: true,
			MaxBytes: 8 << 30,
		},
	}
}

// Stream returns the name of the stream behind the bucket.
func (b BucketSpec) Stream() string {
	if b.Objects {
		return "OBJ_" + b.Name
	}
	return "KV_" + b.Name
}

// Metadata returns the keys of the server's metadata of a bucket: see StreamSpec.Metadata.
func (b BucketSpec) Metadata() map[string]string { return metadata(b.Owner, b.Schema) }

// Metadata returns the keys of the server's metadata of a stream: the release that described it last, who owns it, and
// the types of its events.
func (s StreamSpec) Metadata() map[string]string { return metadata(s.Owner(), s.Schema()) }

// Metadata returns the keys of the server's metadata of a durable: see StreamSpec.Metadata.
func (d Durable) Metadata() map[string]string {
	s, _ := StreamNamed(d.Stream)
	return metadata(d.Service, s.Schema())
}

// metadata returns the keys that the three have in common, without those that have no value.
func metadata(owner, schema string) map[string]string {
	of := map[string]string{"meander.version": Release}
	if owner != "" {
		of["meander.owner"] = owner
	}
	if schema != "" {
		of["meander.schema"] = schema
	}
	return of
}

// Owner returns the service that makes a stream's messages, or client; empty: all of them do, or the server.
func (s StreamSpec) Owner() string {
	switch s.Name {
	case StreamGroups, StreamRequests, StreamParked:
		return ServiceIntake
	case StreamSteps, StreamTrajectories, StreamApplied:
		return ServiceSampler
	case StreamRewards:
		return ServiceReward
	case StreamAdvantages:
		return ServiceAdvantage
	case StreamDead, StreamAdvisories:
		return ""
	}
	return ownerClient
}

// Schema returns the types of a stream's events, as in "step/1, tokens/1"; empty: they are the server's.
func (s StreamSpec) Schema() string {
	var types []string
	for _, subject := range s.Subjects {
		tail, _ := SubjectTail(subject)
		kind, _, _ := strings.Cut(tail, ".")
		switch kind {
		case KindOpening:
			kind = KindGroup
		case KindParked:
			kind = KindRequest
		}
		for _, e := range Events() {
			if strings.HasPrefix(e.Type(), kind+"/") && kind != "" {
				types = append(types, e.Type())
			}
		}
	}
	return strings.Join(slices.Compact(types), ", ")
}
