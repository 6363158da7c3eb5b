package bus_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// The copies of guests have room on a store of any size: the new streams share what the guests leave.
func TestBus_Setup_roomForGuests(t *testing.T) {
	t.Parallel()
	guests := []auth.User{
		{Name: "one", Role: auth.RoleTrainer, Runs: []schemas.Run{"a"}, Mark: "M1", Key: "K1"},
		{Name: "two", Role: auth.RoleViewer, Runs: []schemas.Run{"b"}, Mark: "M2", Key: "K2", CopyBytes: 1 << 30},
	}
	accounts := func(o *natsd.Options) {
		o.Token = "secret" // a server that lets everybody in has no guests
		for i := range guests {
			u := &guests[i]
			crossings, err := u.Crossings()
			if err != nil {
				t.Fatal(err)
			}
			g := natsd.Guest{Account: u.Account(), MaxStore: u.CopySpace(), API: natsd.Service(u.API()), Hears: u.Hears()}
			for _, c := range crossings {
				g.Services = append(g.Services, natsd.Service(c))
			}
			o.Guests = append(o.Guests, g)
		}
	}
	// Guests for whom there is no room leave nothing behind.
	e := newEnv(t, "in-process", func(o *natsd.Options) { o.MaxFileStore = 1 << 30 })
	if err := e.Setup(t.Context(), bus.RoomFor(guests)); err == nil || !strings.Contains(err.Error(), "copies of guests") {
		t.Errorf("on a store of 1 GiB: %v", err)
	}
	if err := e.Setup(t.Context()); err != nil {
		t.Errorf("without guests after that: %v", err)
	}
	// On some of these, streams of the next lower scale would leave less than the guests need.
	for _, size := range []int64{2 << 30, 25 << 28, 49 << 28, 99 << 28, 40 << 30} {
		t.Run(fmt.Sprint(size>>20, " MiB"), func(t *testing.T) {
			e := newEnv(t, "tcp", accounts, func(o *natsd.Options) { o.MaxFileStore = size })
			if err := e.Setup(t.Context(), bus.RoomFor(guests)); err != nil {
				t.Fatal(err)
			}
			if err := e.SetupGuests(t.Context(), guests); err != nil {
				t.Error(err)
			}
			var total int64
			for _, spec := range schemas.Streams() {
				total += e.Info(t, spec.Name).Config.MaxBytes
			}
			if left := size - 3<<29; total > left || total < left/8 {
				t.Errorf("the streams got %d bytes of %d", total, left)
			}
			if _, err := e.JetStream().Stream(t.Context(), "MDR_ROOM"); !errors.Is(err, jetstream.ErrStreamNotFound) {
				t.Errorf("the room is still held: %v", err)
			}
		})
	}
}
