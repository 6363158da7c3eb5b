package integration_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// The negative control of the kill test: a worker that copies trajectories to a stream
// without a guard or message ids and acks afterwards. It loses nothing, and what it
// stores twice shows that the test can see duplicates.
const (
	naiveEnv     = "MEANDER_TEST_NAIVE_WORKER" // URL of the server
	naiveStream  = "NAIVE"
	naiveSubject = "naive."
)

// The worker must be a process that can be killed, so this program becomes one when
// asked to.
func init() {
	url := os.Getenv(naiveEnv)
	if url == "" {
		return
	}
	if err := naive(url); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func naive(url string) error {
	ctx := context.Background()
	b, err := bus.Connect(ctx, bus.Config{URL: url, Name: "naive", ConnectTimeout: -1}, zerolog.Nop())
	if err != nil {
		return err
	}
	for {
		_, err = b.JetStream().CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: naiveStream, Subjects: []string{naiveSubject + ">"}})
		if err == nil {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	return b.Consume(ctx, bus.ConsumerConfig{
		Stream: schemas.StreamTrajectories, Durable: "naive", AckWait: killAckWait, Slots: 16, MaxDeliver: -1,
	}, func(ctx context.Context, m *bus.Message) error {
		if _, err := b.PublishRaw(ctx, naiveSubject+strings.TrimPrefix(m.Subject, schemas.Prefix), nil, nil, ""); err != nil {
			return err
		}
		// Between publish and ack there is always some time. Here it is long, so that a kill
		// finds messages in this state whatever the speed of the machine.
		time.Sleep(300 * time.Millisecond)
		return nil
	})
}
