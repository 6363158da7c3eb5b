package auth

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/schemas"
)

// maxCredentials bounds a file of credentials, in bytes.
const maxCredentials = 64 << 10

// Identity is a user of a server as its own file of credentials describes it. The zero Identity has no file.
type Identity struct {
	file string
	user User // Key: empty for a JWT. Role and Runs: what meander auth wrote beside the key; empty in other files.
	// option proves the identity to the server.
	option nats.Option
}

// rolePattern matches the comments beside the key, such as "# role: reward".
var rolePattern = regexp.MustCompile(`(?m)^# (role|runs): (\S+)$`)

// ReadIdentity reads a client's file of credentials in one of NATS's two forms: a JWT with its key, or the seed of an
// NKey, for which comments in the file may name role and runs. An error names the file and what it must have.
func ReadIdentity(file string) (Identity, error) {
	id := Identity{file: file}
	info, err := os.Stat(file)
	if err == nil && (!info.Mode().IsRegular() || info.Size() > maxCredentials) {
		err = fmt.Errorf("open %s: not a file of credentials", file)
	}
	var text []byte
	if err == nil {
		text, err = os.ReadFile(file)
	}
	if err != nil {
		return id, fmt.Errorf("credentials: %w", err)
	}
	for _, m := range rolePattern.FindAllSubmatch(text, -1) {
		switch value := string(m[2]); {
		case string(m[1]) == "role":
			id.user.Role = Role(value)
		case value != allRuns:
			id.user.Runs = parseRuns(value)
		}
	}
	if bytes.Contains(text, []byte("BEGIN NATS USER JWT")) {
		id.option = nats.UserCredentials(file)
		return id, nil
	}
	if id.option, err = nats.NkeyOptionFromSeed(file); err != nil {
		return id, fmt.Errorf("credentials: %s: %w; must have the seed of a user (SU...), or a JWT and its key", file,
			err)
	}
	var o nats.Options
	if err := id.option(&o); err != nil {
		return id, fmt.Errorf("credentials: %s: %w", file, err)
	}
	id.user.Key = o.Nkey
	return id, nil
}

// InboxOf returns the prefix of the inboxes of the user with a public key. On a server with roles, no other user may
// listen there.
func InboxOf(key string) string { return nats.InboxPrefix + key }

// InboxPrefix returns InboxOf for the identity's key; "": the server allows any inbox.
func (id Identity) InboxPrefix() string {
	if id.user.Key == "" {
		return ""
	}
	return InboxOf(id.user.Key)
}

// Option returns the connect option that proves the identity to the server; nil: there is nothing to prove.
func (id Identity) Option() nats.Option { return id.option }

// String names the user in errors.
func (id Identity) String() string {
	switch {
	case id.user.Role != "":
		return "role " + string(id.user.Role) + " (" + id.file + ")"
	case id.file != "":
		return "the user of " + id.file
	}
	return "this user of the server"
}

// IsGuest reports whether the user is limited to some runs.
func (id Identity) IsGuest() bool { return id.user.IsGuest() }

// Runs returns the runs that a guest is limited to, separated by commas; "": all.
func (id Identity) Runs() string {
	if !id.IsGuest() {
		return ""
	}
	return formatRuns(id.user.Runs)
}

// ListsConsumers reports whether the user may list the names of all consumers of a stream.
func (id Identity) ListsConsumers(stream string) bool {
	g, known := GrantOf(id.user.Role)
	return !known || g.Unlimited || g.ListsConsumers || id.IsGuest() || isWorkQueue(stream)
}

// MayFind reports whether a stream, as this user sees it, can hold messages that the filters match. It is false for a
// guest whose copy of the stream has other runs only: a reader then need not ask the server.
func (id Identity) MayFind(stream string, filters ...string) bool {
	if !id.IsGuest() || len(filters) == 0 {
		return true
	}
	own := runFilters(stream, id.user.Runs)
	return len(own) == 0 || slices.ContainsFunc(filters, func(f string) bool {
		return slices.ContainsFunc(own, func(o string) bool { return schemas.Overlap(o, f) })
	})
}

// MissingRight returns the end of an error about a publish that the server refused: it names the roles that may
// publish on the subject, and the runs if the user is limited to some.
func (id Identity) MissingRight(subject string) string {
	var may []string
	limited := false // the role may publish there, but not for these runs
	for _, g := range Grants() {
		r, err := g.rights(&User{})
		switch {
		case err != nil || !r.mayPublish(subject):
		case g.Role != id.user.Role || g.Unlimited:
			may = append(may, string(g.Role))
		default:
			limited = id.IsGuest()
		}
	}
	text := "; the roles that may are " + strings.Join(may, ", ")
	switch {
	case limited && strings.Contains(subject, "."+schemas.StreamBlobBucket):
		return fmt.Sprintf("; it is limited to the runs %s, and blobs are of no run: meander auth add --blobs lets a "+
			"user fetch those of all", id.Runs())
	case limited:
		return fmt.Sprintf("; it is limited to the runs %s%s", id.Runs(), text)
	}
	return text
}
