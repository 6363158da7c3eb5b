package natsd

import (
	"errors"
	"fmt"

	"github.com/nats-io/nats-server/v2/server"
)

// Guest is an account with its own streams. Only the subjects named here connect it to the account of all other
// users, the host account.
type Guest struct {
	Account string
	// MaxStore bounds the bytes that its streams store.
	MaxStore int64
	// Services lead from subjects of this account to subjects of the host account. API leads the other way.
	Services []Service
	API      Service
	// Hears are subjects of the host account that this account may subscribe to.
	Hears []string
}

// Service connects a subject of one account to a subject of another: requests on From arrive on To.
type Service struct{ From, To string }

// setupGuestAccounts makes an account for each guest, and connects it with the host account, where the pipeline's
// streams are, by the subjects that the guest may use. It runs once, after the server has started; then guests may
// connect. It fails if the server refuses an account or a subject.
func setupGuestAccounts(ns *server.Server, guests []Guest, auth authenticator) error {
	host := ns.GlobalAccount()
	accountsOf := map[string][]*server.Account{}
	accounts := map[string]*server.Account{}
	for _, guest := range guests {
		account, err := ns.RegisterAccount(guest.Account)
		if err != nil {
			return fmt.Errorf("account %s: %w", guest.Account, err)
		}
		accounts[guest.Account] = account
		for _, s := range guest.Services {
			accountsOf[s.To] = append(accountsOf[s.To], account)
		}
	}
	for subject, by := range accountsOf {
		if err := host.AddServiceExport(subject, by); err != nil {
			return fmt.Errorf("%s for guests: %w", subject, err)
		}
	}
	for _, guest := range guests {
		account := accounts[guest.Account]
		// Without a limit for memory, a guest could use all of it.
		limits := map[string]server.JetStreamAccountLimits{"": {
			MaxMemory: 0, MaxStore: guest.MaxStore, MaxStreams: -1,
			MaxConsumers: -1,
		}}
		err := errors.Join(
			account.EnableJetStream(limits, nil),
			account.AddServiceExport(guest.API.To, []*server.Account{host}),
			host.AddServiceImport(account, guest.API.From, guest.API.To),
		)
		for _, subject := range guest.Hears {
			err = errors.Join(err, host.AddStreamExport(subject, []*server.Account{account}),
				account.AddStreamImport(host, subject, ""))
		}
		for _, s := range guest.Services {
			err = errors.Join(err, account.AddServiceImport(host, s.From, s.To))
		}
		if err != nil {
			return fmt.Errorf("account %s: %w", guest.Account, err)
		}
	}
	auth.server.Store(ns)
	return nil
}
