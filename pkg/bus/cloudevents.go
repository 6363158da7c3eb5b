package bus

import (
	"cmp"
	"net/url"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// cloudEventType begins the types of our events as CloudEvents have them, which are to name who defines them.
const cloudEventType = "io.github.meander-rl."

// addCloudEvent gives the message of an event the attributes of CloudEvents 1.0 in binary mode, if the connection is to
// (Config.CloudEvents): the payload stays as it is. A message that is sent again keeps those that it has.
func (b *Bus) addCloudEvent(m *nats.Msg) {
	kind, version, event := strings.Cut(m.Header.Get(schemas.HeaderType), "/")
	if !b.cloudEvents || !event || m.Header["ce-id"] != nil {
		return
	}
	for name, value := range map[string]string{
		"ce-specversion": "1.0", "ce-type": cloudEventType + kind + ".v" + version, "ce-source": b.source(),
		"ce-id": m.Header.Get(jetstream.MsgIDHeader), "ce-subject": schemas.MessageID(m.Subject),
		"ce-time":            time.Now().UTC().Format(time.RFC3339Nano),
		"ce-datacontenttype": m.Header.Get(schemas.HeaderContentType),
	} {
		m.Header[name] = []string{value}
	}
}

// source returns who publishes, as the programs name their connections, without the instance.
func (b *Bus) source() string {
	program, _, _ := strings.Cut(cmp.Or(b.nc.Opts.Name, "meander-client"), " ")
	return "/" + url.PathEscape(program)
}
