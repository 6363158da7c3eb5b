package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A cluster keeps a stream on several servers, and direct gets and readers are answered by
// any of them. One that lags does not know yet what the stream has confirmed, and to those
// who read "not there" means "nobody ever asked for it". So in a cluster what may be new is
// asked of the stream's leader, and a reader knows from it when it has seen everything.

// ErrNoLeader is returned when a stream of a cluster has no leader: its servers elect one,
// which takes some seconds, or too few of them are up for a majority.
var ErrNoLeader = errors.New("no leader: its servers elect one, or too few of them are up; start those that are down")

// codeNotAvailable is the server's answer while the cluster, or the one stream, has no leader.
const codeNotAvailable = 10008

// noLeader names the server's answer for what it is.
func noLeader(err error) error {
	if api, ok := errors.AsType[*jetstream.APIError](err); ok && api.ErrorCode == codeNotAvailable {
		return fmt.Errorf("%w (%w)", ErrNoLeader, err)
	}
	return err
}

// lagPause is how long a server that lags is given until it is looked at again.
const lagPause = 20 * time.Millisecond

// clustered says whether the server is one of several.
func (b *Bus) clustered() bool { return b.nc.ConnectedClusterName() != "" }

// asksLeaders says whether what may be new is asked of leaders: in a cluster, but by those who may
// read some runs only, for whom a server has no such right.
func (b *Bus) asksLeaders() bool { return b.clustered() && (b.who.runs == "" || b.who.runs == "*") }

// leaderSubject is where the leader of a stream is asked for one message.
func leaderSubject(stream string) string { return "$JS.API.STREAM.MSG.GET." + stream }

// fromLeader reads the answer of a stream's leader.
func fromLeader(stream string, resp *nats.Msg) (*Message, error) {
	var a struct {
		Error   *jetstream.APIError `json:"error"`
		Message *struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
			Time    time.Time `json:"time"`
		} `json:"message"`
	}
	if len(resp.Data) == 0 && resp.Header.Get(headerStatus) == statusNoServer {
		return nil, jetstream.ErrNoStreamResponse
	}
	if err := json.Unmarshal(resp.Data, &a); err != nil {
		return nil, fmt.Errorf("get: %w", err)
	}
	switch {
	case a.Error != nil && a.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return nil, ErrNotFound
	case a.Error != nil:
		return nil, noLeader(a.Error)
	case a.Message == nil:
		return nil, errors.New("get: the answer has no message")
	}
	header := nats.Header{}
	if len(a.Message.Header) > 0 {
		var err error
		if header, err = nats.DecodeHeadersMsg(a.Message.Header); err != nil {
			return nil, fmt.Errorf("get: %w", err)
		}
	}
	return &Message{Subject: a.Message.Subject, Data: a.Message.Data, Header: header, Stream: stream, Seq: a.Message.Seq, Time: a.Message.Time}, nil
}

// unseen says whether the leader of a stream has a message that matches the filters (none:
// all), from one sequence to another: a reader that found none has read a server that lags.
// Without a cluster there is none.
func (b *Bus) unseen(ctx context.Context, stream string, filters []string, from, to uint64) (bool, error) {
	if !b.asksLeaders() || from > to {
		return false, nil
	}
	if len(filters) == 0 {
		filters = []string{">"}
	}
	for _, filter := range filters {
		m, err := b.ask(ctx, stream, leaderSubject(stream), directRequest{Seq: max(1, from), NextFor: filter})
		switch {
		case errors.Is(err, ErrNotFound):
		case err != nil:
			return false, err
		case m.Seq <= to:
			return true, nil
		}
	}
	return false, nil
}

// reached is the last sequence of a stream that a reader has to know of: in a cluster the
// leader's, else 0, for there is nobody who lags.
func (b *Bus) reached(ctx context.Context, stream string) (uint64, error) {
	if !b.asksLeaders() {
		return 0, nil
	}
	info, err := b.StreamInfo(ctx, stream)
	if err != nil {
		return 0, err
	}
	return info.State.LastSeq, nil
}

// fresh is many, answered by a server that knows all up to the sequence reached.
func (b *Bus) fresh(ctx context.Context, stream string, req directRequest, reached uint64) (page []*Message, upTo, pending uint64, err error) {
	for {
		err = b.patiently(ctx, func(ctx context.Context) (err error) {
			page, upTo, pending, err = b.many(ctx, stream, req)
			return err
		})
		if err != nil || upTo >= reached {
			return page, upTo, pending, err
		}
		if len(page) == 0 { // which says nothing of how far the server is
			if lags, err := b.unseen(ctx, stream, req.MultiLast, 1, reached); err != nil || !lags {
				return nil, 0, 0, err
			}
		}
		if err := pause(ctx, lagPause); err != nil {
			return nil, 0, 0, err
		}
	}
}
