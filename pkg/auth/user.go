package auth

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// User is one user of a server.
//
// A user who is limited to runs is a guest, in its own account of the server. Within an account, the server sends
// answers to any subject that a request names, and treats them there like requests of its own (nats-server issue
// 8274). So a guest's account has copies of the streams that it may read, with the messages of its runs, and only
// the subjects that it may write lead out of the account. Other requests of a guest can only harm the guest itself.
type User struct {
	Name string `json:"name"`
	Role Role   `json:"role"`
	// Runs limit a guest; none: all. Blobs: the guest may fetch the blobs of all runs.
	Runs  []schemas.Run `json:"runs,omitempty"`
	Blobs bool          `json:"blobs,omitempty"`
	// CopyBytes bounds what all of a guest's copies take on all servers together; 0: DefaultCopyBytes.
	CopyBytes int64 `json:"copy_bytes,omitempty"`
	// Mark ends the names of a guest's durables, so that other users cannot guess them; empty in old folders.
	Mark string `json:"mark,omitempty"`
	// Key is the public key. Only the user's file has the secret one.
	Key string `json:"key"`
}

// DefaultCopyBytes is how many bytes the copies of a guest may take by default.
const DefaultCopyBytes = 512 << 20

// MinCopyBytes is how many bytes the copies of a guest need at least.
const MinCopyBytes = 64 << 20

// PipelinePrefix starts the subjects on which a guest's account sends requests to the pipeline's account. Without it
// they would mean the guest's own account.
const PipelinePrefix = "pipeline.API"

const (
	guestPrefix = "guest-"
	// allRuns stands for the runs of a user who is not limited.
	allRuns = "*"
)

// Rights returns the server's permissions of the user.
func (u *User) Rights() (Rights, error) {
	g, ok := GrantOf(u.Role)
	if !ok {
		return Rights{}, fmt.Errorf("role: %q; must be one of %s", u.Role, strings.Join(RoleNames(), ", "))
	}
	return g.rights(u)
}

// IsGuest reports whether the user is limited to runs.
func (u *User) IsGuest() bool { return len(u.Runs) > 0 }

// RunNames returns the runs that the user is limited to, separated by commas; * for all.
func (u *User) RunNames() string { return formatRuns(u.Runs) }

// formatRuns joins the names of runs with commas, as files of credentials and errors show them; no runs mean all.
func formatRuns(runs []schemas.Run) string {
	if len(runs) == 0 {
		return allRuns
	}
	names := make([]string, len(runs))
	for i, run := range runs {
		names[i] = string(run)
	}
	return strings.Join(names, ",")
}

func parseRuns(text string) (runs []schemas.Run) {
	for name := range strings.SplitSeq(text, ",") {
		runs = append(runs, schemas.Run(name))
	}
	return runs
}

// Account returns the name of a guest's account.
func (u *User) Account() string { return guestPrefix + u.Name }

// IsGuestName reports whether an account, or a durable, belongs to a guest.
func IsGuestName(name string) bool { return strings.HasPrefix(name, guestPrefix) }

// CopyDurable returns the name of the durables that deliver a guest's copies.
func (u *User) CopyDurable() string {
	if u.Mark == "" {
		return u.Account()
	}
	return u.Account() + "-" + u.Mark
}

// CopySpace returns how many bytes a guest's copies may take.
func (u *User) CopySpace() int64 {
	if u.CopyBytes > 0 {
		return u.CopyBytes
	}
	return DefaultCopyBytes
}

// CopySubject returns the subject on which messages for a guest's copy of a stream are delivered.
func (u *User) CopySubject(stream string) string { return "guest." + u.Name + ".copy." + stream }

// Hears returns all subjects of the pipeline's account that reach a guest's account: messages for its copies, and
// confirmations.
func (u *User) Hears() []string { return []string{u.CopySubject("*"), InboxOf(u.Key) + ".>"} }

// Crossing connects a subject of one account to a subject of another: requests on From arrive on To.
type Crossing struct{ From, To string }

// API leads from the pipeline's account to the streams of a guest's account. The admin creates the copies through it.
func (u *User) API() Crossing {
	return Crossing{From: "guest." + u.Name + ".API.>", To: "$JS.API.>"}
}

// Crossings returns all requests that the server lets out of a guest's account into the pipeline's: events of the
// guest's runs, and for each copied stream two requests with which the server controls the delivery. It fails for a
// user who is no guest.
func (u *User) Crossings() (out []Crossing, err error) {
	grant, ok := GrantOf(u.Role)
	if !ok || !grant.MayBeGuest || !u.IsGuest() {
		return nil, fmt.Errorf("guest %s: role %q, runs %v; must be a role that may be limited to runs, and runs",
			u.Name, u.Role, u.Runs)
	}
	var writes Rights
	writes.allowWrites(grant, u)
	for _, subject := range writes.Publish {
		out = append(out, Crossing{From: subject, To: strings.TrimPrefix(subject, PipelinePrefix+".")})
	}
	for _, stream := range slices.Sorted(maps.Keys(u.Copies())) {
		at := stream + "." + u.CopyDurable()
		reset, flow := "CONSUMER.RESET."+at, "$JS.FC."+at+".*"
		out = append(out, Crossing{From: PipelinePrefix + "." + reset, To: "$JS.API." + reset},
			Crossing{From: flow, To: flow})
	}
	return out, nil
}

// Copies returns the streams that a guest has copies of, by name, each with the filters of the messages in the copy;
// no filters mean all messages.
func (u *User) Copies() map[string][]string {
	grant, _ := GrantOf(u.Role)
	out := map[string][]string{}
	for _, stream := range grant.Reads {
		filters := runFilters(stream, u.Runs)
		switch {
		case isWorkQueue(stream): // a consumer would take the work away
		case len(filters) > 0, stream != schemas.StreamBlobBucket, u.Blobs:
			out[stream] = filters
		}
	}
	return out
}
