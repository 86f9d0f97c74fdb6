"""What a server must survive: clients that leave, stall and send rubbish, a killed engine, hours of everything."""
