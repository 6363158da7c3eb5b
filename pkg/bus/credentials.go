package bus

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"

	"github.com/nats-io/nats.go"
)

// maxCredentials bounds a file of credentials.
const maxCredentials = 64 << 10

// identity is what a file of credentials says of whom it is.
type identity struct {
	file string
	// key is the public key of an NKey; empty for a JWT, which names its user itself.
	key string
	// role and runs are what meander auth wrote beside the key; empty in other files.
	role, runs string
	option     nats.Option
}

// noted is a line of a comment beside the key, such as "# role: reward".
var noted = regexp.MustCompile(`(?m)^# (role|runs): (\S+)$`)

// readCredentials takes both forms that NATS has: a JWT with its key, and the seed of an NKey alone.
func readCredentials(file string) (identity, error) {
	id := identity{file: file}
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
	for _, m := range noted.FindAllSubmatch(text, -1) {
		if string(m[1]) == "role" {
			id.role = string(m[2])
		} else {
			id.runs = string(m[2])
		}
	}
	if bytes.Contains(text, []byte("BEGIN NATS USER JWT")) {
		id.option = nats.UserCredentials(file)
		return id, nil
	}
	if id.option, err = nats.NkeyOptionFromSeed(file); err != nil {
		return id, fmt.Errorf("credentials: %s: %w; must have the seed of a user (SU...), or a JWT and its key", file, err)
	}
	var o nats.Options
	if err := id.option(&o); err != nil {
		return id, fmt.Errorf("credentials: %s: %w", file, err)
	}
	id.key = o.Nkey
	return id, nil
}

// InboxOf is the prefix of the inboxes of the user with a public key: his alone, where the
// server's permissions say so.
func InboxOf(key string) string { return nats.InboxPrefix + key }

// says names who we are, for an error.
func (id identity) says() string {
	switch {
	case id.role != "":
		return "role " + id.role + " (" + id.file + ")"
	case id.file != "":
		return "the user of " + id.file
	}
	return "this user of the server"
}

// connectHint is what to do about a server that does not let us in, for the end of the error.
func connectHint(cfg Config, err error) string {
	text := strings.ToLower(err.Error())
	switch {
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired), strings.Contains(text, "nkeys not supported"):
		switch {
		case cfg.CredsFile != "" && cfg.CAFile == "" && cfg.CertFile == "":
			return fmt.Sprintf("; the server does not know the user of %s, or wants TLS (nats-tls-ca)", cfg.CredsFile)
		case cfg.CredsFile != "":
			return fmt.Sprintf("; the server does not know the user of %s", cfg.CredsFile)
		case cfg.Token == "" && cfg.TokenHandler == nil:
			return "; it wants credentials (nats-creds, MEANDER_NATS_CREDS) or a token (MEANDER_NATS_TOKEN)"
		}
		return "; it does not know the token (MEANDER_NATS_TOKEN), or wants credentials (nats-creds, MEANDER_NATS_CREDS)"
	case strings.Contains(text, "has expired or is not yet valid"):
		return "; make the server a new certificate (meander auth update DIR) and have it read that; or a clock is wrong"
	case strings.Contains(text, "certificate is valid for"), strings.Contains(text, "cannot validate certificate for"), strings.Contains(text, "certificate is not valid for any names"):
		return "; connect by a name that its certificate has, or give it this one: meander auth update DIR --tls-host HOST"
	case strings.Contains(text, "parse root certificate"):
		return "; nats-tls-ca must be a PEM file with the certificate of an authority, such as tls/ca.pem of meander auth init"
	case strings.Contains(text, "unknown authority") && cfg.CAFile != "":
		return fmt.Sprintf("; %s is not the authority that signed its certificate (nats-tls-ca, MEANDER_NATS_TLS_CA)", cfg.CAFile)
	case strings.Contains(text, "unknown authority"):
		return "; name the authority that signed its certificate (nats-tls-ca, MEANDER_NATS_TLS_CA)"
	case strings.Contains(text, "certificate required"), strings.Contains(text, "bad certificate"):
		return "; it wants a certificate of ours (nats-tls-cert, nats-tls-key)"
	}
	return ""
}
