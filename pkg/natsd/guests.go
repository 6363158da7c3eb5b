package natsd

import (
	"errors"
	"fmt"

	"github.com/nats-io/nats-server/v2/server"
)

// Guest is an account with streams of its own, from which nothing reaches the one of everybody else but what it names.
type Guest struct {
	Account string
	// MaxStore bounds what its streams store, in bytes.
	MaxStore int64
	// Services lead from subjects of the account to those of everybody else's, API the other way.
	Services []Service
	API      Service
	// Hears are subjects of everybody else's that the account may subscribe to.
	Hears []string
}

// Service is a subject of one account that leads to one of another.
type Service struct{ From, To string }

// invite makes the accounts of guests, and then lets them in.
func invite(ns *server.Server, guests []Guest, g gate) error {
	host := ns.GlobalAccount()
	asked := map[string][]*server.Account{}
	accounts := map[string]*server.Account{}
	for _, guest := range guests {
		account, err := ns.RegisterAccount(guest.Account)
		if err != nil {
			return fmt.Errorf("account %s: %w", guest.Account, err)
		}
		accounts[guest.Account] = account
		for _, s := range guest.Services {
			asked[s.To] = append(asked[s.To], account)
		}
	}
	for subject, by := range asked {
		if err := host.AddServiceExport(subject, by); err != nil {
			return fmt.Errorf("%s for guests: %w", subject, err)
		}
	}
	for _, guest := range guests {
		account := accounts[guest.Account]
		// Without a limit of memory the server would let it have all.
		limits := map[string]server.JetStreamAccountLimits{"": {MaxMemory: 0, MaxStore: guest.MaxStore, MaxStreams: -1, MaxConsumers: -1}}
		err := errors.Join(
			account.EnableJetStream(limits, nil),
			account.AddServiceExport(guest.API.To, []*server.Account{host}),
			host.AddServiceImport(account, guest.API.From, guest.API.To),
		)
		for _, subject := range guest.Hears {
			err = errors.Join(err, host.AddStreamExport(subject, []*server.Account{account}), account.AddStreamImport(host, subject, ""))
		}
		for _, s := range guest.Services {
			err = errors.Join(err, account.AddServiceImport(host, s.From, s.To))
		}
		if err != nil {
			return fmt.Errorf("account %s: %w", guest.Account, err)
		}
	}
	g.server.Store(ns)
	return nil
}
