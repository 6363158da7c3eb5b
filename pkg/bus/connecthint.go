package bus

import (
	"crypto/x509"
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"
)

// connectHint returns the end of the error of Connect when the server refuses the connection: it says what to do. It
// returns "" when there is no advice.
func connectHint(cfg Config, err error) string {
	text := strings.ToLower(err.Error()) // the client library and TLS alerts of the server have no values to compare
	invalid, isInvalid := errors.AsType[x509.CertificateInvalidError](err)
	_, otherHost := errors.AsType[x509.HostnameError](err)
	_, otherAuthority := errors.AsType[x509.UnknownAuthorityError](err)
	switch {
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired),
		strings.Contains(text, "nkeys not supported"):
		switch {
		case cfg.CredsFile != "" && cfg.CAFile == "" && cfg.CertFile == "":
			return fmt.Sprintf("; the server does not know the user of %s, or wants TLS (nats-tls-ca)", cfg.CredsFile)
		case cfg.CredsFile != "":
			return fmt.Sprintf("; the server does not know the user of %s", cfg.CredsFile)
		case cfg.Token == "" && cfg.TokenHandler == nil:
			return "; it wants credentials (nats-creds, MEANDER_NATS_CREDS) or a token (MEANDER_NATS_TOKEN)"
		}
		return "; it does not know the token (MEANDER_NATS_TOKEN), or wants credentials (nats-creds, " +
			"MEANDER_NATS_CREDS)"
	case isInvalid && invalid.Reason == x509.Expired:
		return "; make the server a new certificate (meander auth update DIR) and have it read that; or a clock is " +
			"wrong"
	case otherHost:
		return "; connect by a name that its certificate has, or give it this one: meander auth update DIR " +
			"--tls-host HOST"
	case strings.Contains(text, "parse root certificate"):
		return "; nats-tls-ca must be a PEM file with the certificate of an authority, such as tls/ca.pem of meander " +
			"auth init"
	case otherAuthority && cfg.CAFile != "":
		return fmt.Sprintf("; %s is not the authority that signed its certificate (nats-tls-ca, MEANDER_NATS_TLS_CA)",
			cfg.CAFile)
	case otherAuthority:
		return "; name the authority that signed its certificate (nats-tls-ca, MEANDER_NATS_TLS_CA)"
	case strings.Contains(text, "certificate required"), strings.Contains(text, "bad certificate"):
		return "; it wants a certificate of ours (nats-tls-cert, nats-tls-key)"
	}
	return ""
}
