package auth

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strings"

	"github.com/nats-io/nats.go"
)

// maxCredentials bounds a file of credentials, in bytes.
const maxCredentials = 64 << 10

// Identity is a user of a server as its own file of credentials describes it. The zero Identity has no file.
type Identity struct {
	file string
	user User // Key: empty for a JWT. Role: what meander auth wrote beside the key; empty in other files.
	// option proves the identity to the server.
	option nats.Option
}

// rolePattern matches the comment beside the key, such as "# role: reward".
var rolePattern = regexp.MustCompile(`(?m)^# role: (\S+)$`)

// ReadIdentity reads a client's file of credentials in one of NATS's two forms: a JWT with its key, or the seed of an
// NKey, for which a comment in the file may name the role. An error names the file and what it must have.
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
	if m := rolePattern.FindSubmatch(text); m != nil {
		id.user.Role = Role(m[1])
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

// ListsConsumers reports whether the user may list the names of all consumers of a stream.
func (id Identity) ListsConsumers(stream string) bool {
	g, known := GrantOf(id.user.Role)
	return !known || g.Unlimited || g.ListsConsumers || isWorkQueue(stream)
}

// Writes reports whether the user is known to have the right to publish on a subject.
func (id Identity) Writes(subject string) bool {
	g, known := GrantOf(id.user.Role)
	r := g.rights(&id.user)
	return id.file == "" || known && r.mayPublish(subject)
}

// MissingRight returns the end of an error about a publish that the server refused: it names the roles that may
// publish on the subject.
func (id Identity) MissingRight(subject string) string {
	var may []string
	for _, g := range Grants() {
		if r := g.rights(&User{}); r.mayPublish(subject) && (g.Role != id.user.Role || g.Unlimited) {
			may = append(may, string(g.Role))
		}
	}
	return "; the roles that may are " + strings.Join(may, ", ")
}

// User is one user of a server.
type User struct {
	Name string `json:"name"`
	Role Role   `json:"role"`
	// Key is the public key. Only the user's file has the secret one.
	Key string `json:"key"`
}

// Rights returns the server's permissions of the user.
func (u *User) Rights() (Rights, error) {
	g, ok := GrantOf(u.Role)
	if !ok {
		return Rights{}, fmt.Errorf("role: %q; must be one of %s", u.Role, strings.Join(RoleNames(), ", "))
	}
	return g.rights(u), nil
}
